"""Drawing tokens: every backend against the reference, and the reference's numbers against plain integers.

Dimensions: B rows, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from paged import CPU_BACKENDS, DTYPES, REFERENCE

from pagoda.kernels.cpu.operators import CpuOperators
from pagoda.kernels.interface import Operators
from pagoda.kernels.random_numbers import exponentials, random_streams

PART = 16384
"""Columns that a thread of the CPU kernels takes at a time."""


def streams(num_rows: int) -> torch.Tensor:
    return random_streams(range(num_rows), [7 * row for row in range(num_rows)])


def random_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(num_rows * vocab_size)
    return (scale * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)


def test_exponentials_are_split_mix() -> None:
    """Other versions and other workers must draw the same numbers: pinned by SplitMix64 in plain integers."""

    def finalise(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def mix(x: int) -> int:
        return finalise((x + 0x9E3779B97F4A7C15) % 2**64)

    cases = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 0), (2**63 - 1, 2**20), (123456789, 42)]
    found = exponentials(random_streams(*zip(*cases, strict=True)), 50)
    expected = [
        [
            -math.log1p(
                -((finalise((mix(mix(counter) ^ seed) + token * 0x9E3779B97F4A7C15) % 2**64) >> 32) + 0.5) / 2**32
            )
            for token in range(50)
        ]
        for seed, counter in cases
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)  # float32 logarithms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1000, PART - 1, PART, PART + 1, 49_152, 128_257])
def test_draws_what_the_reference_draws(ops: Operators[Any, Any], vocab_size: int, dtype: torch.dtype) -> None:
    """Rows of several temperatures, greedy ones among them. Rounding may move a close call: one row of 40 at most."""
    logits_BV = random_logits(40, vocab_size, dtype=dtype)
    temperature_B = torch.tensor([0.0, 0.3, 1.0, 1.7, 50.0] * 8)
    drawn_B = ops.sample(logits_BV, temperature_B, streams(40))
    expected_B = REFERENCE.sample(logits_BV, temperature_B, streams(40))
    assert drawn_B.dtype == torch.int64
    assert int((drawn_B != expected_B).sum()) <= 1
    is_greedy_B = temperature_B == 0
    assert torch.equal(drawn_B[is_greedy_B], expected_B[is_greedy_B])


@pytest.mark.parametrize("scale", [0.0, 0.1, 30.0])
def test_flat_and_steep_rows(ops: Operators[Any, Any], scale: float) -> None:
    """All tokens alike, so that each number is looked at, or a few of all the weight, so that hardly any is."""
    logits_BV, temperature_B = random_logits(100, 3000, scale=scale), torch.ones(100)
    drawn_B = ops.sample(logits_BV, temperature_B, streams(100))
    expected_B = REFERENCE.sample(logits_BV, temperature_B, streams(100))
    assert int((drawn_B != expected_B).sum()) <= 1
    assert len(set(drawn_B.tolist())) > 90


def test_greedy_takes_the_first_of_several(ops: Operators[Any, Any]) -> None:
    """Also where they lie in different parts, and where all other logits are banned."""
    logits_BV = torch.full((2, 3 * PART), float("-inf"))
    logits_BV[0, [PART + 5, 2 * PART + 1]] = -4.0
    logits_BV[1, 7] = 0.0
    assert ops.sample(logits_BV, torch.zeros(2), streams(2)).tolist() == [PART + 5, 7]


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e4])
def test_a_banned_token_is_never_drawn(ops: Operators[Any, Any], temperature: float) -> None:
    logits_BV = torch.full((500, 100), float("-inf"))
    logits_BV[:, [31, 97]] = torch.tensor([-50.0, -50.001])
    drawn = set(ops.sample(logits_BV, torch.full((500,), temperature), streams(500)).tolist())
    assert drawn == ({31} if temperature < 1e-3 else {31, 97})


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("backend", CPU_BACKENDS, ids=lambda ops: ops.name)
def test_alone_and_in_any_batch_and_on_any_threads(backend: CpuOperators, num_threads: int) -> None:
    """A row draws the same whoever is beside it and however many compute."""
    functions = backend._functions
    ops = CpuOperators(functions, instruction_set="same", num_threads=num_threads)
    logits_BV, temperature_B, streams_B = random_logits(9, 40_000), torch.full((9,), 1.3), streams(9)
    together = ops.sample(logits_BV, temperature_B, streams_B).tolist()
    assert backend.sample(logits_BV, temperature_B, streams_B).tolist() == together
    alone = [
        int(ops.sample(logits_BV[row : row + 1], temperature_B[row : row + 1], streams_B[row : row + 1]))
        for row in range(9)
    ]
    assert alone == together
