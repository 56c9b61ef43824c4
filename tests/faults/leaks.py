"""What may be left when nobody wants anything any more: nothing."""

import asyncio
import os
import sys
from dataclasses import asdict, dataclass

from fake_cluster import FakeCluster
from processes import usage_of

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Leaks:
    """What an idle cluster still holds."""

    leaked_blocks: int = 0
    leaked_sequences: int = 0
    leaked_requests: int = 0
    """Live entries of workers, ingress and directory client."""
    leaked_reservations: int = 0
    leaked_tasks: int = 0
    """Of the ingress, more than when it was idle before."""
    leaked_files: int = 0
    """The same of file descriptors."""
    num_problems: int = 0
    """Workers whose bookkeeping contradicts itself."""

    @property
    def is_clean(self) -> bool:
        return not any(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Baseline:
    """An ingress at rest."""

    num_tasks: int
    num_files: int
    rss_bytes: int

    @staticmethod
    def now() -> "Baseline":
        usage = usage_of(os.getpid())
        return Baseline(len(asyncio.all_tasks()), usage.num_files, usage.rss_bytes)


NO_BASELINE = Baseline(sys.maxsize, sys.maxsize, 0)
"""For those who do not know what the ingress takes at rest: its tasks and files are no leaks."""


async def leaks_of(cluster: FakeCluster, baseline: Baseline) -> Leaks:
    """As it is now."""
    probes = await cluster.probe_workers()
    state, now = cluster.directory.state, Baseline.now()
    in_ingress = (
        cluster.client.num_live
        + len(cluster.sessions._outputs)
        + len(cluster.sessions._session_of)
        + len(cluster.service._live._live)
        + len(cluster.service._ending)
        + len(cluster.directory_client._open)
        + len(state.workers.live_at)
    )
    for probe in probes:
        if probe.problem and probe.problem not in cluster.problems:
            cluster.problems.append(probe.problem)
    return Leaks(
        leaked_blocks=sum(probe.num_held_blocks for probe in probes),
        leaked_sequences=sum(probe.num_sequences for probe in probes),
        leaked_requests=in_ingress + sum(probe.num_live_requests for probe in probes),
        leaked_reservations=len(state._reservations),
        leaked_tasks=max(0, now.num_tasks - baseline.num_tasks),
        leaked_files=max(0, now.num_files - baseline.num_files),
        num_problems=len(cluster.problems) + (len(probes) != cluster.shape.num_workers),
    )


async def leaks_after_rest(cluster: FakeCluster, baseline: Baseline, *, deadline_s: float) -> Leaks:
    """As soon as nothing is held any more, or what still is after `deadline_s`."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + deadline_s
    while not (leaks := await leaks_of(cluster, baseline)).is_clean and loop.time() < end_s:
        await asyncio.sleep(_POLL_S)
    return leaks
