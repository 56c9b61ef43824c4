"""Reaches an engine in this process: for offline generation and for tests of the API without a cluster."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.errors import EngineStoppedError
from pagoda.worker.types import Request, SequenceOutput


class LocalWorkerClient:
    """Implements `WorkerClient`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def ping(self) -> None:
        if self._engine.failure is not None:
            raise EngineStoppedError("the engine died")

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        async with aclosing(self._engine.stream(request)) as outputs:
            async for batch in outputs:
                yield batch
