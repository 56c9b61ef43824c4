"""Scenario "fake": workers die once a second under load of all kinds, and nobody notices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_plan import ChaosPlan, Fault, FaultKind
from fake_cluster import ClusterShape, Directory, FakeCluster, fake_cluster
from fake_load import FakeLoad, LoadCounts
from leaks import NO_BASELINE, Baseline, Leaks, leaks_after_rest
from processes import kill, paused
from tcp_proxy import TcpProxy

from pagoda.worker.tokenizer import Tokenizer

REST_DEADLINE_S = 45.0
"""Until nothing may be held any more: a reservation of which nobody hears lasts 30 s."""
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class FakeOutcome:
    """What the scenario came to."""

    counts: LoadCounts
    leaks: Leaks
    num_faults: int
    num_kills: int
    num_deaths: int
    rss_growth_ratio: float
    """Of the ingress and the directory, from when everything had run for a while to the end."""

    @property
    def is_kept(self) -> bool:
        """Whether every promise was."""
        return not self.counts.failed and not self.counts.wrong and self.leaks.is_clean

    def figures(self) -> dict[str, Any]:
        return {
            "num_requests": self.counts.num_requests,
            "num_tokens": self.counts.num_tokens,
            "num_left": self.counts.num_left,
            "failed_requests": len(self.counts.failed),
            "wrong_outputs": len(self.counts.wrong),
            "num_faults": self.num_faults,
            "num_kills": self.num_kills,
            "rss_growth_ratio": round(self.rss_growth_ratio, 3),
            **asdict(self.leaks),
        }


async def run_fake_chaos(
    model: Path,
    shape: ClusterShape,
    plan: ChaosPlan,
    *,
    num_clients: int,
    say: Callable[[str], None] = lambda _: None,
) -> FakeOutcome:
    """Put load on a fake cluster, break it as the plan says, let it rest, and look what is left."""
    async with _proxied_cluster(model, shape) as (cluster, proxy):
        load = FakeLoad(cluster.service, Tokenizer(model), plan.seed)
        await _warm_up(load, cluster)
        baseline = Baseline.now()
        say(f"{shape.num_workers} workers, {num_clients} clients")
        load.is_stopping = False
        running = asyncio.create_task(load.run(num_clients))
        telling = asyncio.create_task(_tell(cluster, load, say))
        breaker = _Breaker(cluster, proxy)
        try:
            half_s = plan.duration_s / 4  # by then caches and pools have their size
            await breaker.run([fault for fault in plan.faults if fault.at_s < half_s], until_s=half_s)
            settled = Baseline.now()
            await breaker.run([fault for fault in plan.faults if fault.at_s >= half_s], until_s=plan.duration_s)
            load.is_stopping = True
            await running
            grown = Baseline.now()
        finally:
            telling.cancel()
            running.cancel()
            await breaker.close()
        await cluster.until_complete()
        leaks = await leaks_after_rest(cluster, baseline, deadline_s=REST_DEADLINE_S)
        for problem in (*load.counts.failed[:20], *load.counts.wrong[:20], *cluster.problems):
            say(f"PROBLEM {problem}")
        return FakeOutcome(
            load.counts, leaks, breaker.num_faults, breaker.num_kills, cluster.num_deaths,
            grown.rss_bytes / settled.rss_bytes,
        )  # fmt: skip


@asynccontextmanager
async def _proxied_cluster(model: Path, shape: ClusterShape) -> AsyncIterator[tuple[FakeCluster, TcpProxy]]:
    """A cluster whose directory is behind a network that may be bad."""
    proxies: list[TcpProxy] = []

    async def through_proxy(directory: Directory) -> str:
        proxies.append(TcpProxy(directory.address))
        return await proxies[0].start()

    try:
        async with fake_cluster(model, shape, directory_address=through_proxy) as cluster:
            yield cluster, proxies[0]
    finally:
        for proxy in proxies:
            await proxy.close()


async def _warm_up(load: FakeLoad, cluster: FakeCluster) -> None:
    """Some requests, so that all threads and connections are there that will be."""
    load.is_stopping = False
    running = asyncio.create_task(load.run(12))
    while load.counts.num_requests < 20:
        await asyncio.sleep(0.05)
    load.is_stopping = True
    await running
    await leaks_after_rest(cluster, NO_BASELINE, deadline_s=REST_DEADLINE_S)


class _Breaker:
    """Does what a plan says."""

    def __init__(self, cluster: FakeCluster, proxy: TcpProxy) -> None:
        self._cluster = cluster
        self._proxy = proxy
        self._lasting: set[asyncio.Task[None]] = set()
        self._begin_s = asyncio.get_running_loop().time()
        self.num_faults = self.num_kills = 0

    async def run(self, faults: Iterable[Fault], *, until_s: float) -> None:
        """`until_s` counts from when this was made, as the faults do."""
        loop = asyncio.get_running_loop()
        for fault in faults:
            await asyncio.sleep(max(0.0, self._begin_s + fault.at_s - loop.time()))
            await self._do(fault)
        await asyncio.sleep(max(0.0, self._begin_s + until_s - loop.time()))

    async def close(self) -> None:
        """Faults that last are over."""
        for task in self._lasting:
            task.cancel()
        await asyncio.gather(*self._lasting, return_exceptions=True)
        await self._heal()

    async def _do(self, fault: Fault) -> None:
        ready = self._cluster.ready
        self.num_faults += 1
        match fault.kind:
            case FaultKind.KILL_WORKER:
                if ready:
                    self.num_kills += kill(fault.victim(ready).process)
            case FaultKind.PAUSE_WORKER:
                if ready:
                    self._last(self._pause(fault.victim(ready).process, 3 * fault.amount))
            case FaultKind.KILL_DIRECTORY:
                self._last(self._restart_directory(2 * fault.amount))
            case FaultKind.CUT_DIRECTORY:
                self._proxy.cut()
            case FaultKind.SLOW_DIRECTORY:
                self._proxy.delay_s = 0.2 * fault.amount
                self._last(self._heal(2.0))
            case FaultKind.MUTE_DIRECTORY:
                self._proxy.is_mute = True
                self._last(self._heal(6 * fault.amount))
            case FaultKind.JUMP_CLOCK:
                hours = round(48 * (fault.amount - 0.5))
                await asyncio.gather(*(each.ask("jump", hours * _HOUR_S) for each in ready), return_exceptions=True)
            case _:
                raise AssertionError(f"{fault.kind} is nothing that a fake cluster has")

    def _last(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    @staticmethod
    async def _pause(process: int, duration_s: float) -> None:
        with paused(process):
            await asyncio.sleep(duration_s)

    async def _restart_directory(self, after_s: float) -> None:
        await self._cluster.directory.kill()
        try:
            await asyncio.sleep(after_s)
        finally:
            await self._cluster.directory.start()

    async def _heal(self, after_s: float = 0.0) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(after_s)
        self._proxy.delay_s = 0.0
        self._proxy.is_mute = False


async def _tell(cluster: FakeCluster, load: FakeLoad, say: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    while True:
        await asyncio.sleep(5.0)
        counts = load.counts
        say(
            f"{loop.time() - begin_s:5.0f} s: {len(cluster.ready)} workers, {cluster.num_deaths} deaths, "
            f"{counts.num_requests} requests, {counts.num_tokens} tokens, {len(counts.failed)} failed, "
            f"{len(counts.wrong)} wrong"
        )
