"""The random numbers that tokens are drawn with: pure functions of a sequence's seed, an index and the token id.

So a request draws the same numbers alone, batched, preempted or resumed elsewhere. Each token has a number of its own:
what rounding does to one token's probability then moves nothing but a close call with it, while one number along the
cumulative distribution would let it move every later boundary.

Source: SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), over the index and seed and then the token.

Dimensions: B sequences, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch


def random_streams(seeds: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
    """int64, B: what the numbers of all tokens at an index of a sequence's output are made from."""
    return torch.from_numpy(_mix(_mix(np.asarray(indices, np.uint64)) ^ np.asarray(seeds, np.uint64)).view(np.int64))


def exponentials(streams_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32, BV: exponentially distributed numbers of mean 1, at most 64."""
    tokens_V = torch.arange(vocab_size, device=streams_B.device) * _signed(0x9E3779B97F4A7C15)
    numbers_BV = torch.empty(len(streams_B), vocab_size, device=streams_B.device)
    for row, stream in enumerate(streams_B):  # a row at a time stays in the cache
        x_V = tokens_V + stream
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x_V.bitwise_xor_(_shift_right(x_V, shift)).mul_(_signed(factor))
        x_V.bitwise_xor_(_shift_right(x_V, 31))
        numbers_BV[row] = _shift_right(x_V, 32)
    # In float32 the largest numbers round to 1, whose logarithm is infinite.
    return numbers_BV.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_().clamp_(max=64.0)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _signed(value: int) -> int:
    """The int64 with the same bits: torch has no unsigned arithmetic, and signed wraps around alike."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
