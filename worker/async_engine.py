"""The engine for asyncio: outputs arrive on an event loop, and a request ends when whoever waits for it goes away."""

import asyncio
from collections.abc import Callable, Collection

from pagoda.worker.block_hash import HashDomain
from pagoda.worker.build import build_engine
from pagoda.worker.config import EngineConfig, EngineLimits
from pagoda.worker.engine import Engine
from pagoda.worker.errors import OverloadedError
from pagoda.worker.kv_layout import KVLayout
from pagoda.worker.load_report import LoadReport
from pagoda.worker.local_ranks import LOCAL_RANKS
from pagoda.worker.metrics import WorkerMetrics
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.tensor_parallel import OnLost, RankPlaces
from pagoda.worker.types import FinishReason, Request, RequestId, SequenceOutput, is_attempt_of
from pagoda.worker.weights import Progress

Sink = Callable[[SequenceOutput], None]
"""Takes a request's outputs, on the event loop; must not block."""


class _Live:
    """A request that has not ended."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.sink = sink
        self.num_samples = len(request.live_samples)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class AsyncEngine:
    """Owns an engine and hands its outputs to one event loop, in one callback a step."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress,
        name: str = "local",
        on_report: Callable[[LoadReport], None] | None = None,
        rank_places: RankPlaces = LOCAL_RANKS,
        on_lost: OnLost | None = None,
    ) -> None:
        """Load and start; blocks until the model is loaded. Raises as `build_engine` does.

        `name` is what tells its metrics from those of other workers. `on_report` is called on the engine's thread;
        `rank_places` and `on_lost` as in `build_engine`.
        """
        self._live: dict[RequestId, _Live] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics = WorkerMetrics(worker=name)
        self._engine: Engine = build_engine(
            config,
            on_outputs=self._on_outputs,
            progress=progress,
            wrap_executor=self._metrics.measured,
            on_report=on_report,
            rank_places=rank_places,
            on_lost=on_lost,
        )
        self._engine.start()

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def hash_domain(self) -> HashDomain:
        return self._engine.hash_domain

    @property
    def layout(self) -> KVLayout:
        return self._engine.layout

    @property
    def announced_windows(self) -> tuple[int, ...]:
        return self._engine.announced_windows

    @property
    def num_token_blocks(self) -> int:
        return self._engine.num_token_blocks

    @property
    def failure(self) -> BaseException | None:
        """Why the engine died, if it did."""
        return self._engine.failure

    def stats(self) -> SchedulerStats:
        return self._engine.stats()

    def metrics_exposition(self) -> str:
        """What was measured, in Prometheus' text format."""
        return self._metrics.exposition(self._engine.stats())

    async def run(self, request: Request, sink: Sink) -> None:
        """Run a request to its end. Cancelling this aborts it.

        All requests of one engine belong to one event loop. Raises as `Engine.add` does, and `OverloadedError` also
        later, if it is shed before anything was done for it; then nothing comes for it.
        """
        self._loop = asyncio.get_running_loop()
        with self._metrics.arrival(request):
            self._engine.add(request)
        # Outputs arrive through the loop that is running this, so none can come before the entry is there.
        live = self._live[request.request_id] = _Live(request, sink)
        try:
            await live.ended
        finally:
            del self._live[request.request_id]
            if live.num_samples:
                self._engine.abort(request.request_id)

    def abort(self, request_id: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one of its samples, with a last output of `reason`. Unknown and ended ones are ignored.

        Whoever names a request need not know how often it has been tried.
        """
        known = request_id in self._live
        for each in [request_id] if known else [i for i in self._live if is_attempt_of(i, request_id)]:
            self._engine.abort(each, index, reason)

    @property
    def live_requests(self) -> Collection[RequestId]:
        """Those that have not ended; a view."""
        return self._live.keys()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait for the running ones. Returns whether all ended in time."""
        return await asyncio.to_thread(self._engine.drain, timeout_s)

    def shutdown(self) -> None:
        self._engine.shutdown()

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Engine thread."""
        self._metrics.take_outputs(outputs)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if (live := self._live.get(output.request_id)) is None:
                continue
            if output.finish_reason is FinishReason.SHED:
                if not live.ended.done():
                    live.num_samples = 0
                    retry_after_s = self._engine.wait_s()
                    live.ended.set_exception(OverloadedError(output.error or "", retry_after_s=retry_after_s))
                continue
            live.sink(output)
            if output.finish_reason is not None:
                live.num_samples -= 1
                if live.num_samples == 0 and not live.ended.done():
                    live.ended.set_result(None)
