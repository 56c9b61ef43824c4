"""What steps took becomes what steps will take."""

import random

import pytest

from pagoda.worker.cost_model import StepCostModel, StepCosts, StepShape


def test_finds_what_the_steps_were_made_of() -> None:
    """Decodes, whole prompts and chunks in all mixtures, each 5 % off."""
    draw, model = random.Random(0), StepCostModel()
    base_s, token_s, pair_s, decode_s = 5e-3, 4e-4, 2e-7, 1e-3
    for _ in range(400):
        num_tokens = draw.choice((0, 0, draw.randrange(1, 512)))
        pairs = num_tokens * (draw.randrange(2000) + num_tokens / 2)
        shape = StepShape(num_tokens, pairs, draw.randrange(32))
        duration_s = base_s + token_s * num_tokens + pair_s * pairs + decode_s * shape.num_decodes
        model.observe(shape, duration_s * draw.uniform(0.95, 1.05))
    costs = model.costs()
    assert costs.base_s == pytest.approx(base_s, rel=0.5)
    assert costs.per_prefill_token_s == pytest.approx(token_s, rel=0.1)
    assert costs.per_pair_s == pytest.approx(pair_s, rel=0.1)
    assert costs.per_decode_s == pytest.approx(decode_s, rel=0.1)


def test_nothing_seen_costs_nothing() -> None:
    model = StepCostModel()
    assert model.costs() == StepCosts()
    model.observe(StepShape(0, 0.0, 4), 0.02)
    costs = model.costs()
    assert costs.per_prefill_token_s == costs.per_pair_s == 0.0
    assert costs.base_s + 4 * costs.per_decode_s == pytest.approx(0.02)


def test_nothing_is_negative() -> None:
    """Whatever the steps were."""
    draw, model = random.Random(1), StepCostModel()
    for _ in range(200):
        num_tokens = draw.randrange(500)
        model.observe(StepShape(num_tokens, num_tokens * 10.0, draw.randrange(9)), draw.random() / (1 + num_tokens))
        assert min(vars_of(model.costs())) >= 0.0


def vars_of(costs: StepCosts) -> tuple[float, ...]:
    return costs.base_s, costs.per_prefill_token_s, costs.per_pair_s, costs.per_decode_s


def test_follows_a_machine_that_becomes_slower() -> None:
    model = StepCostModel()
    for factor in (1.0, 3.0):
        for number in range(1000):
            num_tokens = 100 + number % 200
            model.observe(StepShape(num_tokens, 0.0, 0), factor * 1e-3 * num_tokens)
            model.costs()
    assert model.costs().per_prefill_token_s == pytest.approx(3e-3, rel=0.1)


def test_the_first_prompt_is_explained_by_its_tokens() -> None:
    """Else a worker that has computed a short one seems to compute long ones for nothing, and gets them all."""
    model = StepCostModel()
    model.observe(StepShape(500, 500 * 250.0, 0), 1.5)
    assert model.costs().per_prefill_token_s == pytest.approx(3e-3)
    for _ in range(20):
        model.observe(StepShape(0, 0.0, 1), 0.01)
    costs = model.costs()
    assert costs.per_prefill_token_s == pytest.approx(3e-3, rel=0.05)
    assert costs.base_s + costs.per_decode_s == pytest.approx(0.01, rel=0.05)
