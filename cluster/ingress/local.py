"""Reaches an engine in this process: for offline generation and for tests of the API without a cluster."""

import asyncio
from collections.abc import AsyncGenerator

from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.errors import EngineStoppedError
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.types import FinishReason, Request, RequestId, SequenceOutput


class LocalWorkerClient:
    """Implements `WorkerClient`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def ping(self) -> None:
        if self._engine.failure is not None:
            raise EngineStoppedError("the engine died")

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        outputs = PendingOutputs()
        running = asyncio.ensure_future(self._engine.run(request, outputs.put))
        running.add_done_callback(outputs.end_with)
        try:
            async for batch in outputs.until_ended(request.sampling.n):
                yield batch
        finally:
            running.cancel()

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        self._engine.abort(request_id, index, FinishReason.STOP)

    async def scrape(self) -> list[str | None]:
        return [self._engine.metrics_exposition()]
