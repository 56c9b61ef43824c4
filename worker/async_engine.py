"""The engine for asyncio: one stream of outputs per request, aborted when its reader goes away."""

import asyncio
from collections.abc import AsyncGenerator

from pagoda.worker.build import build_engine
from pagoda.worker.config import EngineConfig, EngineLimits
from pagoda.worker.engine import Engine
from pagoda.worker.scheduler import SchedulerStats
from pagoda.worker.types import Request, RequestId, SequenceOutput
from pagoda.worker.weights import Progress


class AsyncEngine:
    """Owns an engine and hands its outputs to the event loop that reads them, one callback a step."""

    def __init__(self, config: EngineConfig, *, progress: Progress) -> None:
        """Load and start; blocks until the model is loaded. Raises as `build_engine` does."""
        self._queues: dict[RequestId, asyncio.Queue[SequenceOutput]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine = build_engine(config, on_outputs=self._on_outputs, progress=progress)
        self._engine.start()

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def failure(self) -> BaseException | None:
        """Why the engine died, if it did."""
        return self._engine.failure

    def stats(self) -> SchedulerStats:
        return self._engine.stats()

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        """Run a request; yields what came since the last time. Closing the iterator early aborts the request.

        All streams of one engine belong to one event loop. Raises as `Engine.add` does.
        """
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[SequenceOutput] = asyncio.Queue()
        self._engine.add(request)
        # Outputs arrive through the loop that is running this, so none can come before the queue is there.
        self._queues[request.request_id] = queue
        num_live = request.sampling.n
        try:
            while num_live:
                outputs = [await queue.get()]
                while not queue.empty():
                    outputs.append(queue.get_nowait())
                num_live -= sum(output.finish_reason is not None for output in outputs)
                yield outputs
        finally:
            del self._queues[request.request_id]
            if num_live:
                self._engine.abort(request.request_id)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait for the running ones. Returns whether all ended in time."""
        return await asyncio.to_thread(self._engine.drain, timeout_s)

    def shutdown(self) -> None:
        self._engine.shutdown()

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Engine thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if (queue := self._queues.get(output.request_id)) is not None:
                queue.put_nowait(output)
