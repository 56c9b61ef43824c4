"""Penalties and bias against a plain-Python oracle.

Dimensions: B sequences, V vocabulary.
"""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from pagoda.kernels.torch_ops import TorchOperators
from pagoda.worker.input_batch import Row
from pagoda.worker.logit_adjustment import adjust_logits
from pagoda.worker.sampler import sample
from pagoda.worker.types import SamplingParams

V = 12


def row(prompt: list[int], output: list[int], **sampling: Any) -> Row:
    memory = np.full(64, V - 1, np.int32)  # what another sequence left: must not count
    memory[: len(prompt) + len(output)] = [*prompt, *output]
    return Row(
        index=0,
        num_tokens=len(prompt) + len(output),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**{"temperature": 0.0} | sampling),
        seed=0,
        eos_token_ids=frozenset(),
        memory=memory,
        next_prompt_logprob=len(prompt),
    )


def adjusted(logits: list[float], one: Row) -> list[float]:
    """The specification: one token at a time, bias before penalties."""
    sampling, tokens, output = one.sampling, one.token_ids.tolist(), one.output_token_ids.tolist()
    result = []
    for token, before in enumerate(logits):
        logit = before + sampling.logit_bias.get(token, 0.0)
        if token in tokens:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        if token in output:
            logit -= sampling.presence_penalty
        logit -= sampling.frequency_penalty * output.count(token)
        result.append(logit)
    return result


def random_row(drawn: random.Random) -> Row:
    """Each setting is on or off."""
    sampling: dict[str, Any] = {
        "presence_penalty": drawn.uniform(-2, 2),
        "frequency_penalty": drawn.uniform(-2, 2),
        "repetition_penalty": drawn.choice([0.5, 1.3, 3.0]),
        "logit_bias": {drawn.randrange(V): drawn.uniform(-100, 100) for _ in range(3)},
    }
    kept = {name: value for name, value in sampling.items() if drawn.random() < 0.5}
    prompt = [drawn.randrange(V - 1) for _ in range(drawn.randrange(1, 6))]
    return row(prompt, [drawn.randrange(V - 1) for _ in range(drawn.randrange(9))], **kept)


@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int) -> None:
    """Every mix of settings in one batch, float32; the sum of the adjustments rounds a few times."""
    drawn = random.Random(seed)
    rows = [random_row(drawn) for _ in range(9)]
    logits = [[drawn.uniform(-20, 20) for _ in range(V)] for _ in rows]
    expected = [adjusted(row_logits, one) for row_logits, one in zip(logits, rows, strict=True)]
    torch.testing.assert_close(adjust_logits(torch.tensor(logits), rows), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    alone = [adjust_logits(torch.tensor([v]), [one])[0] for v, one in zip(logits, rows, strict=True)]
    assert torch.equal(torch.stack(alone), adjust_logits(torch.tensor(logits), rows)), "alone is not as in a batch"


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits_BV = torch.zeros(2, V)
    rows = [row([1], [2, 2, 3], presence_penalty=1.0), row([1], [2, 2, 3], frequency_penalty=1.0)]
    assert adjust_logits(logits_BV, rows)[:, :5].tolist() == [[0, 0, -1, -1, 0], [0, 0, -2, -1, 0]]


def test_only_repetition_looks_at_the_prompt() -> None:
    settings: list[dict[str, Any]] = [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 2.0},
    ]
    result_BV = adjust_logits(torch.ones(3, V), [row([4, 4], [], **sampling) for sampling in settings])
    assert result_BV[:, 4].tolist() == [1, 1, 0.5]


def test_negative_logits_are_made_less_probable_too() -> None:
    result_BV = adjust_logits(torch.full((1, V), -1.0), [row([4], [5], repetition_penalty=2.0)])
    assert result_BV[0, 3:7].tolist() == [-1, -2, -2, -1]


def test_bias_moves_the_greedy_choice() -> None:
    logits_BV = torch.arange(V).float().repeat(3, 1)
    rows = [row([0], [], logit_bias=bias) for bias in ({}, {3: 100.0}, {V - 1: -100.0, V - 2: -5.0})]
    assert sample(logits_BV, rows, TorchOperators()) == [V - 1, 3, V - 3]


def test_neighbours_keep_their_logits() -> None:
    """A row that asks for nothing has bit-identical logits beside one that asks for everything."""
    logits_BV = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    one = row([1], [2], presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0, logit_bias={0: 1.0})
    assert torch.equal(adjust_logits(logits_BV.clone(), [row([1], [2]), one])[0], logits_BV[0])


def test_nothing_asked_copies_nothing() -> None:
    """The common case does not pay for the rare one."""
    logits_BV = torch.randn(2, V).bfloat16()
    assert adjust_logits(logits_BV, [row([1], [2])] * 2) is logits_BV


def test_bfloat16_logits_are_adjusted_in_float32() -> None:
    """Near 20, bfloat16 steps by 0.125: a penalty of 0.01 would vanish."""
    logits_BV = torch.full((1, V), 20.0, dtype=torch.bfloat16)
    result_BV = adjust_logits(logits_BV, [row([1], [2], presence_penalty=0.01)])
    assert result_BV[0, 2].item() == pytest.approx(19.99)


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
def test_extreme_repetition_penalty_is_no_nan(penalty: float) -> None:
    """Whatever is accepted must leave logits that can be sampled from."""
    logits_BV = torch.tensor([[-30.0, 0.0, 30.0, 1.0] + [0.5] * (V - 4)])
    rows = [row([0, 1], [2], repetition_penalty=penalty, temperature=1e-9)]
    assert adjust_logits(logits_BV.clone(), rows).isfinite().all()
    assert sample(logits_BV, rows, TorchOperators()) == [2 if penalty < 1 else 3]


def test_banned_stays_banned() -> None:
    """`min_tokens` and every adjustment together: the end of sequence has no probability, and nothing is NaN."""
    one = row([3], [3], repetition_penalty=0.5, presence_penalty=-2.0, logit_bias={3: 100.0}, min_tokens=5)
    one.eos_token_ids = frozenset({3})
    result_V = adjust_logits(torch.ones(1, V), [one])[0]
    assert result_V[3].item() == -math.inf
    assert not result_V.isnan().any()
