"""What one worker replica does, apart from being a Ray Serve deployment (which `app.py` makes of it)."""

import logging
from collections.abc import AsyncIterator

from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import EngineConfig
from pagoda.worker.scheduler import SchedulerStats
from pagoda.worker.types import Request, SequenceOutput

logger = logging.getLogger(__name__)


class Worker:
    """Owns one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = AsyncEngine(
            config, progress=lambda what, done, total: logger.debug("%s %d/%d", what, done, total)
        )

    async def ping(self) -> None:
        """Answers."""

    async def stats(self) -> SchedulerStats:
        return self._engine.stats()

    async def stream(self, request: Request) -> AsyncIterator[list[SequenceOutput]]:
        """Outputs of a request; aborted when the reader goes away."""
        async for outputs in self._engine.stream(request):
            yield outputs

    def check_health(self) -> None:
        """Serve restarts the replica when this raises."""
        if self._engine.failure is not None:
            raise RuntimeError("the engine died") from self._engine.failure

    def __del__(self) -> None:
        """Serve calls this when the replica stops, after its requests ended or ran out of time."""
        self._engine.shutdown()
