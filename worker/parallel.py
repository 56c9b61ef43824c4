"""Tensor parallelism as one rank sees it: which shard it holds, and the sums over all ranks.

Every layer is split so that two sums a layer are enough (Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053,
sec. 3): the projections into attention and feed-forward by their outputs (each rank has some of the heads and columns),
those out of them by their inputs, which leaves each rank with a part of the sum. The vocabulary is split by its rows.

The sums are NCCL's on GPUs and gloo's on CPUs. Whoever calls them must call them on every rank, in the same order.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

JOIN_DEADLINE_S = 60.0
"""Ranks that are to meet are all running by then."""
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
        distributed.broadcast(sent, group_src=0, group=self.group)
        received: list[int] = sent.tolist()
        return received

    def split(self, size: int) -> tuple[int, int]:
        """(start, end) of this rank's share of `size` equal things; the last ranks may get fewer, or none."""
        share = -(-size // self.size)
        start = min(self.rank * share, size)
        return start, min(start + share, size)

    def leave(self) -> None:
        """The rank has made its last call. The group ends with its last reference; NCCL's is torch's own."""
        if self.size > 1 and self.group is distributed.group.WORLD:
            distributed.destroy_process_group()


SINGLE = TPContext()


def meeting_point(host: str) -> socket.socket:
    """Where the ranks can meet: the first one listens there, on a free port of this `host`, until it joins."""
    return socket.create_server((host, 0))


def join(
    rank: int, size: int, *, host: str, port: int, device: torch.device, listener: socket.socket | None = None
) -> TPContext:
    """Meet the other ranks at `host:port`, where the first one listens, and wait until all are there.

    `listener`: the first rank's `meeting_point`, if it listens there already; taken over. `device` becomes this
    process's own. Raises whatever torch does if one of them does not come in time, or goes.
    """
    if size == 1:
        return SINGLE
    deadline = timedelta(seconds=JOIN_DEADLINE_S)
    # With a descriptor of ours the store listens on `host` alone; it would choose all interfaces.
    descriptor = None if listener is None else listener.detach()
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, size, rank == 0, timeout=deadline, wait_for_workers=False, master_listen_fd=descriptor
    )
    if device.type == "cuda":
        own = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(own)
        limit = timedelta(seconds=COLLECTIVE_DEADLINE_S)
        distributed.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=own)
        return TPContext(rank, size, distributed.group.WORLD)
    return TPContext(rank, size, _gloo_group(store, rank, size, host if rank == 0 else _own_address(host)))


def _gloo_group(store: Any, rank: int, size: int, host: str) -> Any:
    """A process group that listens at `host`.

    `init_process_group` would listen wherever this machine's name leads, on many machines 127.0.1.1, and could be
    called once in a process.
    """
    options: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=COLLECTIVE_DEADLINE_S)
    gloo: Any = distributed.ProcessGroupGloo(store, rank, size, options)
    group: Any = distributed.ProcessGroup(store, rank, size)
    kind = distributed.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    return group


def _own_address(host: str) -> str:
    """The address of this machine from which it reaches `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address: str = probe.getsockname()[0]
    return address


def device_of_rank(first: torch.device, rank: int) -> torch.device:
    """The device of a rank on the first one's host: the GPU as many places further, or the same CPU."""
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first
