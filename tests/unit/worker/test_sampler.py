"""The sampler against plain-Python oracles on small vocabularies.

Dimensions: B sequences, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.torch_ops import TorchOperators
from pagoda.worker.input_batch import Row
from pagoda.worker.sampler import sample as sample_with
from pagoda.worker.types import SamplingParams

PROBS = (0.02, 0.30, 0.05, 0.25, 0.03, 0.20, 0.05, 0.10)
"""In no order, with a tie of tokens 2 and 6."""
NUM_DRAWS = 2000
"""The least kept probability is 0.02, so a kept token is never drawn with probability 0.98**2000 < 1e-17."""


def row(seed: int = 0, num_output_tokens: int = 0, eos: Sequence[int] = (), **sampling: Any) -> Row:
    return Row(
        memory=np.zeros(5 + num_output_tokens, np.int32),
        next_prompt_logprob=5,
        index=0,
        num_tokens=5 + num_output_tokens,
        num_prompt_tokens=5,
        sampling=SamplingParams(**sampling),
        seed=seed,
        eos_token_ids=frozenset(eos),
    )


def sample(logits_BV: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    return sample_with(logits_BV, rows, TorchOperators())


def logits_of(probs: Sequence[float], num_rows: int = 1) -> torch.Tensor:
    """Logits whose softmax is `probs`, shifted as logits are."""
    return (torch.tensor(probs).log() + 3.0).repeat(num_rows, 1)


def draws(probs: Sequence[float], num_draws: int = NUM_DRAWS, **sampling: Any) -> Counter[int]:
    """How often each token is drawn, over as many seeds."""
    rows = [row(seed, **sampling) for seed in range(num_draws)]
    return Counter(sample(logits_of(probs, num_draws), rows))


def by_probability(probs: Sequence[float]) -> list[int]:
    return sorted(range(len(probs)), key=lambda token: -probs[token])


def kept_by_top_k(probs: Sequence[float], top_k: int) -> set[int]:
    """The k most probable tokens, and what ties with the last of them."""
    if not 0 < top_k < len(probs):
        return set(range(len(probs)))
    least = probs[by_probability(probs)[top_k - 1]]
    return {token for token, prob in enumerate(probs) if prob >= least}


def kept_by_top_p(probs: Sequence[float], top_p: float) -> set[int]:
    """The smallest set of most probable tokens that reaches top-p, and what ties with the last of them."""
    order, total, least = by_probability(probs), 0.0, 0.0
    for token in order:
        least = probs[token]
        total += least
        if total >= top_p:
            break
    return {token for token, prob in enumerate(probs) if prob >= least}


def kept_by_min_p(probs: Sequence[float], min_p: float) -> set[int]:
    return {token for token, prob in enumerate(probs) if prob >= min_p * max(probs)}


# -- what is kept ----------------------------------------------------------------------------------


def test_greedy_takes_the_most_probable_token() -> None:
    """Temperature 0 is the argmax, whatever the filters and seeds."""
    rows = [row(seed, temperature=0.0, top_k=3, top_p=0.1, min_p=0.5) for seed in range(3)]
    logits_BV = torch.tensor([[1.0, 5.0, 2.0], [-3.0, -7.0, -2.0], [0.0, 0.0, -1.0]])
    assert sample(logits_BV, rows) == [1, 2, 0]


@pytest.mark.parametrize("top_k", [-1, 0, 1, 2, 4, 5, 6, 7, 8, 9, 1000])
def test_top_k_keeps_the_k_most_probable(top_k: int) -> None:
    """-1 and 0 keep all, as does k at or above the vocabulary; a tie at the k-th keeps both."""
    assert set(draws(PROBS, top_k=top_k)) == kept_by_top_k(PROBS, top_k)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.29, 0.31, 0.54, 0.56, 0.74, 0.76, 0.86, 0.91, 0.94, 0.97, 0.99, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float) -> None:
    """Values on both sides of each step of the sum 0.30, 0.55, 0.75, 0.85, 0.90, 0.95, 0.98, 1."""
    assert set(draws(PROBS, top_p=top_p)) == kept_by_top_p(PROBS, top_p)


def test_tiny_top_p_keeps_the_first() -> None:
    """A top-p below every probability is greedy, also where float32 makes it 0."""
    for top_p in (1e-3, 1e-12, 1e-38, 1e-60):
        assert set(draws(PROBS, top_p=top_p)) == {1}


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.09, 0.12, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_min_p_drops_what_is_less_probable_than_its_share_of_the_first(min_p: float) -> None:
    assert set(draws(PROBS, min_p=min_p)) == kept_by_min_p(PROBS, min_p)


def test_filters_apply_in_order() -> None:
    """Top-p counts what top-k left: of 0.30 and 0.25, renormalised to 0.545 and 0.455, 0.54 keeps the first only."""
    assert set(draws(PROBS, top_k=2, top_p=0.54)) == {1}
    assert set(draws(PROBS, top_k=2, top_p=0.55)) == {1, 3}
    assert set(draws(PROBS, top_k=3, min_p=0.7)) == {1, 3}


def test_rows_are_filtered_each_by_its_own_settings() -> None:
    """A batch that mixes greedy, every filter and none draws for each row as if it were alone."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_k": 500},
        {"top_p": 0.5},
        {"min_p": 0.4},
        {"temperature": 0.3, "top_k": 6, "top_p": 0.9},
    ]
    for seed in range(50):
        rows = [row(seed, **sampling) for sampling in settings]
        alone = [sample(logits_of(PROBS), [one])[0] for one in rows]
        assert sample(logits_of(PROBS, len(rows)), rows) == alone


def test_a_row_without_top_p_keeps_its_tail_beside_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: the first two tokens sum to 1 in float32, so a top-p of 1 that is counted drops the third.

    A request that keeps everything must draw the same beside a request with top-p as alone. The clocks here let the
    third token win wherever it is kept.
    """
    clocks = torch.tensor([1.0, 1.0, 1e-12])
    monkeypatch.setattr("pagoda.kernels.torch_ops.exponentials", lambda streams_B, _: clocks.expand(len(streams_B), -1))
    probs = (0.5, 0.5, 1e-9)
    assert sample(logits_of(probs), [row()]) == [2]
    assert sample(logits_of(probs, 2), [row(), row(top_p=0.9)]) == [2, 0]


def test_top_p_looks_beyond_the_first_thousand_tokens() -> None:
    """Scenario: 3000 tokens of equal probability but for their order; top-p 0.5 keeps half of them."""
    weights = [1 + token / 3000 for token in range(3000)]
    probs = [weight / sum(weights) for weight in weights]
    kept = kept_by_top_p(probs, 0.5)
    drawn = set(draws(probs, top_p=0.5))
    assert len(kept) > 1024
    # Which token is the last one kept depends on how 1,200 float32 summands of 4e-4 round. That none of the last 50
    # is drawn has a probability below 1e-25.
    assert min(kept) - 1 <= min(drawn) < min(kept) + 50
    assert 700 < len(drawn) <= len(kept) + 1


# -- how it is drawn -------------------------------------------------------------------------------


DISTRIBUTIONS: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "plain": ({}, PROBS),
    "temperature 2": ({"temperature": 2.0}, [p**0.5 / sum(q**0.5 for q in PROBS) for p in PROBS]),
    "top-k 3": ({"top_k": 3}, [p / 0.75 if p >= 0.2 else 0 for p in PROBS]),
    "top-p 0.8": ({"top_p": 0.8}, [p / 0.85 if p >= 0.1 else 0 for p in PROBS]),
}


@pytest.mark.parametrize(("sampling", "probs"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("varied", ["seed", "output index"])
def test_distribution(sampling: dict[str, Any], probs: Sequence[float], varied: str) -> None:
    """Pearson's chi-square over 10,000 draws that differ in seed or in output index.

    With 7 degrees of freedom it is above 41 with probability 1e-6, with fewer less often.
    """
    num_draws = 10_000
    rows = [
        row(seed=index, **sampling) if varied == "seed" else row(seed=7, num_output_tokens=index, **sampling)
        for index in range(num_draws)
    ]
    drawn = Counter(sample(logits_of(PROBS, num_draws), rows))
    assert set(drawn) == {token for token, prob in enumerate(probs) if prob}
    statistic = sum((drawn[t] - num_draws * p) ** 2 / (num_draws * p) for t, p in enumerate(probs) if p)
    assert statistic < 41


def test_rounding_moves_only_close_calls() -> None:
    """Scenario: batching shifts logits by 1e-4. One draw along the cumulative sum would change 5 % of tokens."""
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3 * torch.randn(400, 5000, generator=generator)
    shifted_BV = logits_BV + 1e-4 * torch.randn(400, 5000, generator=generator)
    rows = [row(seed) for seed in range(400)]
    before, after = sample(logits_BV, rows), sample(shifted_BV, rows)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 2


def test_same_seed_and_index_draw_the_same_alone_and_in_any_batch() -> None:
    """A request is redrawn alone, in another order and beside others, also where the logits are real-sized."""
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3 * torch.randn(16, 5000, generator=generator)
    rows = [row(seed=seed, num_output_tokens=seed % 5, temperature=1.3, top_p=0.95, top_k=400) for seed in range(16)]
    batched = sample(logits_BV.clone(), rows)
    assert [sample(logits_BV[i : i + 1].clone(), [rows[i]])[0] for i in range(16)] == batched
    assert sample(logits_BV.flip(0), rows[::-1]) == batched[::-1]
    assert len(set(batched)) > 8


def test_temperature_near_zero_is_greedy_and_not_nan() -> None:
    """Logits divided by 1e-6 are huge; the draw still is the argmax, also where it is the last or first token."""
    logits_BV = torch.tensor([[50.0, -80.0, 49.0], [-1e4, 0.0, 1e4], [0.1, 0.1001, 0.0999]])
    for seed in range(50):
        rows = [row(seed, temperature=1e-6, top_p=0.9, min_p=0.01) for _ in range(3)]
        assert sample(logits_BV.clone(), rows) == [0, 2, 1]


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    """Scenario: 1,000 tokens of 0.001 each; summed in bfloat16 the total would stop growing at 0.5.

    How often the second half is drawn is 6 standard deviations, of half a root of the draws each, from a half at most.
    """
    logits_BV = torch.zeros(NUM_DRAWS, 1000, dtype=torch.bfloat16)
    drawn = Counter(sample(logits_BV, [row(seed) for seed in range(NUM_DRAWS)]))
    assert sum(drawn[token] for token in range(500, 1000)) == pytest.approx(NUM_DRAWS / 2, abs=3 * math.sqrt(NUM_DRAWS))


def test_a_clock_that_hardly_rings_never_lets_a_dropped_token_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: the only kept token has the largest number that there is."""
    monkeypatch.setattr("pagoda.kernels.torch_ops.exponentials", lambda *_: torch.full((1, 4), 64.0))
    assert sample(logits_of((0.1, 0.1, 0.5, 0.3)), [row(top_k=1)]) == [2]


# -- min_tokens ------------------------------------------------------------------------------------


def ended(num_output_tokens: int, **sampling: Any) -> int:
    """What a greedy row samples where tokens 3, 2, 1, 0 are wanted in this order; 3 ends a sequence, 2 is a stop."""
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    one = row(0, num_output_tokens, eos=(3,), temperature=0.0, stop_token_ids=(2,), **sampling)
    return sample(logits_BV, [one])[0]


def test_min_tokens_bans_ends_until_then() -> None:
    """With min_tokens 2 the first two tokens may end nothing; the third may."""
    assert [ended(n, min_tokens=2) for n in range(4)] == [1, 1, 3, 3]


def test_min_tokens_leaves_an_ignored_eos_alone() -> None:
    """With ignore_eos an end-of-sequence token is a token like any other, so it is not banned; stop tokens are."""
    assert [ended(n, min_tokens=2, ignore_eos=True) for n in range(4)] == [3, 3, 3, 3]
    logits_BV = torch.tensor([[0.0, 1.0, 4.0, 3.0]])
    one = row(0, 0, eos=(3,), temperature=0.0, stop_token_ids=(2,), min_tokens=1, ignore_eos=True)
    assert sample(logits_BV, [one]) == [3]


def test_min_tokens_holds_when_drawing() -> None:
    """A banned token has no probability, and the others share it."""
    rows = [row(seed, 0, eos=(1,), stop_token_ids=(3,), min_tokens=1) for seed in range(NUM_DRAWS)]
    assert set(sample(logits_of(PROBS, NUM_DRAWS), rows)) == {0, 2, 4, 5, 6, 7}


def test_min_tokens_without_anything_to_ban() -> None:
    """A model without an end-of-sequence token, and a request without stop tokens."""
    assert sample(torch.tensor([[0.0, 1.0]]), [row(temperature=0.0, min_tokens=5)]) == [1]


def test_a_ban_stays_in_its_row() -> None:
    """Neighbours that are past their minimum, or have none, still end."""
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(3, 1)
    rows = [row(0, n, eos=(3,), temperature=0.0, min_tokens=m) for n, m in ((4, 5), (5, 5), (0, 0))]
    assert sample(logits_BV, rows) == [2, 3, 3]
