"""Chooses the next tokens of a batch.

Randomness is counter-based: the numbers a token is drawn with depend only on its sequence's seed, its index in the
output and the token ids, so a request draws the same numbers alone, batched, preempted or resumed elsewhere. Each token
has a number of its own: what rounding does to one token's probability then moves nothing but a close call with it,
while one number along the cumulative distribution would let it move every later boundary.

Dimensions: B sequences, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.worker.input_batch import Row
from pagoda.worker.logit_adjustment import adjust_logits

_FIRST_LOOK = 1024
"""Most probable tokens that top-p looks at before it sorts the whole vocabulary."""


class Workspace:
    """Memory for a step's numbers, kept from step to step: to get it takes longer than to fill it."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, like_BV: torch.Tensor) -> torch.Tensor:
        """float32, of the shape and on the device of `like_BV`; holds anything. Valid until `name` is taken again."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < like_BV.numel() or memory.device != like_BV.device:
            memory = self._memory[name] = torch.empty(like_BV.numel(), dtype=torch.float32, device=like_BV.device)
        return memory[: like_BV.numel()].view(like_BV.shape)


def sample(logits_BV: torch.Tensor, rows: Sequence[Row], workspace: Workspace | None = None) -> list[int]:
    """One token per sequence. `logits_BV` is mutated."""
    workspace = workspace or Workspace()
    logits_BV = adjust_logits(logits_BV, rows)
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(random) == len(rows):
        drawn: list[int] = _draw(logits_BV, rows, workspace).tolist()
        return drawn
    tokens_B = argmax(workspace.take("logits", logits_BV).copy_(logits_BV))
    if random:
        tokens_B[random] = _draw(logits_BV[random], [rows[index] for index in random], workspace)
    tokens: list[int] = tokens_B.tolist()
    return tokens


def argmax(x_BV: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest number, the first if several are."""
    if x_BV.device.type == "cpu":  # where numpy's is a hundred times as fast as torch's
        return torch.from_numpy(x_BV.numpy().argmax(-1))
    return x_BV.argmax(-1)


def exponentials(seeds: Sequence[int], counters: Sequence[int], numbers_BV: torch.Tensor) -> torch.Tensor:
    """Fill `numbers_BV`, float32, with exponentially distributed numbers: pure functions of (seed, counter) and token.

    Source: SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), over the seed and counter and then the token.
    """
    streams = _mix(_mix(np.asarray(counters, np.uint64)) ^ np.asarray(seeds, np.uint64)).view(np.int64)
    tokens_V = torch.arange(numbers_BV.shape[1], device=numbers_BV.device) * _signed(0x9E3779B97F4A7C15)
    for row, stream in enumerate(streams.tolist()):  # a row at a time stays in the cache
        x_V = tokens_V + stream
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x_V.bitwise_xor_(_shift_right(x_V, shift)).mul_(_signed(factor))
        x_V.bitwise_xor_(_shift_right(x_V, 31))
        numbers_BV[row] = _shift_right(x_V, 32)
    # In float32 the largest numbers round to 1, whose clock would never ring.
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


def _draw(logits_BV: torch.Tensor, rows: Sequence[Row], workspace: Workspace) -> torch.Tensor:
    """Draw from softmax(logits / temperature) after top-k, top-p and min-p."""
    vocab_size = logits_BV.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_BV.device)[:, None]

    temperature_B1 = column([max(row.sampling.temperature, 1e-5) for row in rows])
    top_k = [row.sampling.top_k if 0 < row.sampling.top_k < vocab_size else vocab_size for row in rows]
    top_p_B1 = column([row.sampling.top_p for row in rows])
    min_p_B1 = column([row.sampling.min_p for row in rows])

    logits_BV = workspace.take("logits", logits_BV).copy_(logits_BV).div_(temperature_B1)
    if min(top_k) < vocab_size:
        _keep_top_k(logits_BV, top_k)
    probs_BV = torch.softmax(logits_BV, -1, out=workspace.take("probs", logits_BV))
    if bool((top_p_B1 < 1).any()):
        _keep_top_p(probs_BV, top_p_B1)
    if bool((min_p_B1 > 0).any()):
        probs_BV.masked_fill_(probs_BV < min_p_B1 * probs_BV.amax(-1, keepdim=True), 0)

    # Of exponential clocks with the probabilities as rates, the first to ring is each with its probability.
    seeds, counters = [row.seed for row in rows], [row.num_output_tokens for row in rows]
    clocks_BV = exponentials(seeds, counters, logits_BV)  # which are not needed any more
    return argmax(probs_BV.div_(clocks_BV))


def _keep_top_k(logits_BV: torch.Tensor, top_k: list[int]) -> None:
    """Ban all but the k largest of each row (and what ties with the k-th). Mutates."""
    vocab_size = logits_BV.shape[-1]
    largest_BK = logits_BV.topk(max(k for k in [*top_k, 0] if k < vocab_size), dim=-1).values
    for index, k in enumerate(top_k):
        if k < vocab_size:
            row_V = logits_BV[index]
            row_V.masked_fill_(row_V < largest_BK[index, k - 1], float("-inf"))


def _keep_top_p(probs_BV: torch.Tensor, top_p_B1: torch.Tensor) -> None:
    """Zero all but the smallest set of most probable tokens that reaches top-p; a top-p of 1 keeps all. Mutates."""
    is_on_B1 = top_p_B1 < 1
    sorted_BK = probs_BV.topk(min(_FIRST_LOOK, probs_BV.shape[-1]), dim=-1).values
    if bool(((sorted_BK.sum(-1, keepdim=True) < top_p_B1) & is_on_B1).any()):
        sorted_BK = probs_BV.sort(-1, descending=True).values
    before_BK = sorted_BK.cumsum(-1) - sorted_BK
    # A token is kept if those before it have not reached top-p yet; the first always is.
    num_kept_B1 = (before_BK < top_p_B1).sum(-1, keepdim=True).clamp(min=1)
    threshold_B1 = sorted_BK.gather(-1, num_kept_B1 - 1)
    # Summed in float32, the first tokens may reach 1 before the last: without top-p those would be lost.
    probs_BV.masked_fill_((probs_BV < threshold_B1) & is_on_B1, 0)
