"""Chooses the next tokens of a batch: adjusts logits, drops what top-k, top-p and min-p do not keep, draws.

Randomness is counter-based, see `kernels/random_numbers.py`: a request draws the same numbers alone, batched, preempted
or resumed elsewhere.

Dimensions: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from pagoda.kernels.interface import Operators
from pagoda.kernels.random_numbers import random_streams
from pagoda.kernels.reference import MIN_TEMPERATURE
from pagoda.worker.input_batch import Row
from pagoda.worker.logit_adjustment import adjust_logits

_FIRST_LOOK = 1024
"""Most probable tokens that top-p looks at before it sorts the whole vocabulary."""


def sample(logits_BV: torch.Tensor, rows: Sequence[Row], ops: Operators[Any, Any]) -> list[int]:
    """One token per sequence. `logits_BV` is mutated."""
    logits_BV = adjust_logits(logits_BV, rows)
    temperature_B = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    temperature_B = temperature_B.to(logits_BV.device)
    _drop_improbable(logits_BV, rows, temperature_B)
    streams_B = random_streams([row.seed for row in rows], [row.num_output_tokens for row in rows])
    tokens: list[int] = ops.sample(logits_BV, temperature_B, streams_B.to(logits_BV.device)).tolist()
    return tokens


def _drop_improbable(logits_BV: torch.Tensor, rows: Sequence[Row], temperature_B: torch.Tensor) -> None:
    """Ban what top-k, top-p and min-p do not keep, in the rows that draw and ask for it. Mutates."""
    drawing = [(index, row.sampling) for index, row in enumerate(rows) if row.sampling.temperature > 0]
    top_k = [(index, sampling.top_k) for index, sampling in drawing if 0 < sampling.top_k < logits_BV.shape[-1]]
    if top_k:
        _keep_top_k(logits_BV, top_k)
    asked = [(index, sampling) for index, sampling in drawing if sampling.top_p < 1 or sampling.min_p > 0]
    if not asked:
        return

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_BV.device)[:, None]

    indices = torch.tensor([index for index, _ in asked], device=logits_BV.device)
    asked_BV, divisor_B1 = logits_BV[indices], temperature_B[indices].clamp(min=MIN_TEMPERATURE)[:, None]
    probs_BV = torch.softmax(asked_BV.float() / divisor_B1, -1)
    least_B1 = torch.maximum(
        _least_of_top_p(probs_BV, column([sampling.top_p for _, sampling in asked])),
        column([sampling.min_p for _, sampling in asked]) * probs_BV.amax(-1, keepdim=True),
    )
    logits_BV[indices] = asked_BV.masked_fill_(probs_BV < least_B1, float("-inf"))


def _keep_top_k(logits_BV: torch.Tensor, top_k: Sequence[tuple[int, int]]) -> None:
    """Ban all but the k largest of the row, for each (row, k), and what ties with the k-th. Mutates."""
    indices = torch.tensor([index for index, _ in top_k], device=logits_BV.device)
    largest_BK = logits_BV[indices].topk(max(k for _, k in top_k), dim=-1).values
    for (index, k), largest_K in zip(top_k, largest_BK, strict=True):
        row_V = logits_BV[index]
        row_V.masked_fill_(row_V < largest_K[k - 1], float("-inf"))


def _least_of_top_p(probs_BV: torch.Tensor, top_p_B1: torch.Tensor) -> torch.Tensor:
    """B1: the least probability in the smallest set of most probable tokens that reaches top-p; 0 if top-p is 1."""
    is_on_B1 = top_p_B1 < 1
    if not bool(is_on_B1.any()):
        return torch.zeros_like(top_p_B1)
    sorted_BK = probs_BV.topk(min(_FIRST_LOOK, probs_BV.shape[-1]), dim=-1).values
    total_BK = sorted_BK.cumsum(-1)
    if bool(((total_BK[:, -1:] < top_p_B1) & is_on_B1).any()):
        sorted_BK = probs_BV.sort(-1, descending=True).values
        total_BK = sorted_BK.cumsum(-1)
    before_BK = total_BK - sorted_BK
    # A token is kept if those before it have not reached top-p yet; the first always is.
    num_kept_B1 = (before_BK < top_p_B1).sum(-1, keepdim=True).clamp(min=1)
    # Summed in float32, the first tokens may reach 1 before the last: without top-p those would be lost.
    return sorted_BK.gather(-1, num_kept_B1 - 1).masked_fill_(~is_on_B1, 0)
