"""Tensor parallelism as one rank sees it: which shard it holds, and the sums over all ranks.

Every layer is split so that two sums a layer are enough (Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053,
sec. 3): the projections into attention and feed-forward by their outputs (each rank has some of the heads and columns),
those out of them by their inputs, which leaves each rank with a part of the sum. The vocabulary is split by its rows.

The sums are NCCL's on GPUs and gloo's on CPUs. Whoever calls them must call them on every rank, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

COLLECTIVE_DEADLINE_S = 300.0
"""A rank that hangs for so long fails the step on all others; one that dies does so at once."""


@dataclass(frozen=True, slots=True)
class TPContext:
    """One rank's place among `size` ranks; alone, every operation is its own input."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The process group of the ranks; None for one rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x` (mutated), the same on every rank."""
        if self.size > 1:
            distributed.all_reduce(x, group=self.group)
        return x

    def gather_columns(self, x_BX: torch.Tensor) -> torch.Tensor:
        """All ranks' `x_BX` side by side, in the order of the ranks, on every rank; of equal shapes."""
        if self.size == 1:
            return x_BX
        x_BX = x_BX.contiguous()
        parts = [torch.empty_like(x_BX) for _ in range(self.size)]
        distributed.all_gather(parts, x_BX, group=self.group)
        return torch.cat(parts, dim=1)

    def from_first(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The first rank's `numbers`, on every rank; the others' count only by their length, which must be the same."""
        if self.size == 1:
            return list(numbers)
        sent = torch.tensor(numbers, dtype=torch.int64, device=device)
        distributed.broadcast(sent, src=0, group=self.group)
        received: list[int] = sent.tolist()
        return received

    def split(self, size: int) -> tuple[int, int]:
        """(start, end) of this rank's share of `size` equal things; the last ranks may get fewer, or none."""
        share = -(-size // self.size)
        start = min(self.rank * share, size)
        return start, min(start + share, size)


SINGLE = TPContext()


def join(rank: int, size: int, *, host: str, port: int, device: torch.device) -> TPContext:
    """Meet the other ranks at `host:port`, where the first one listens, and wait until all are there.

    Raises whatever torch does if one of them does not come in time, or goes. One process holds one rank.
    """
    if size == 1:
        return SINGLE
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
    )
    return TPContext(rank, size, distributed.group.WORLD)
