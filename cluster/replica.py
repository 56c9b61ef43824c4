"""What one worker replica does, apart from being a Ray Serve deployment (which `app.py` makes of it)."""

import logging
import uuid
from collections.abc import AsyncIterator, Callable

from pagoda.cluster.ingress.sessions import WorkerEndpoint
from pagoda.cluster.logs import LogLevel, log_through_serve
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import InvalidRequestError, OverloadedError, PagodaError
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.server import SessionLostError, WorkerServer
from pagoda.worker.types import Request

logger = logging.getLogger(__name__)


class Worker:
    """Owns one engine and the gRPC server over which its tokens leave."""

    def __init__(self, config: EngineConfig, token: str, own_address: Callable[[], str], log_level: LogLevel) -> None:
        """`own_address` gives the address of this host that ingress processes can dial; `token` is theirs to show."""
        log_through_serve(log_level)
        self._boot_id = uuid.uuid4().hex
        self._token = token
        self._own_address = own_address
        self._engine = AsyncEngine(
            config,
            progress=lambda what, done, total: logger.debug("%s %d/%d", what, done, total),
            name=self._boot_id,
        )
        self._server: WorkerServer | None = None

    async def record_replica_metadata(self) -> dict[str, str]:
        """Serve calls this once the worker is made, and hands the result to every router."""
        self._server = WorkerServer(self._engine, token=self._token)
        endpoint = WorkerEndpoint(address=await self._server.start(self._own_address()), boot_id=self._boot_id)
        return endpoint.as_metadata()

    async def ping(self) -> None:
        """Answers."""

    async def stats(self) -> SchedulerStats:
        return self._engine.stats()

    async def run_request(self, request: Request, ingress_id: str) -> AsyncIterator[PagodaError | None]:
        """Run a request to its end; its tokens go over the ingress's session. Cancelled when the client goes.

        What comes at the end is why it was refused, if it was: Serve writes a stack trace into the log for whatever is
        raised here.
        """
        assert self._server is not None
        try:
            await self._server.run_request(request, ingress_id)
        except (InvalidRequestError, OverloadedError, SessionLostError) as error:
            yield error
        else:
            yield None

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises. Asynchronous, or Serve would start a thread for each call."""
        if self._engine.failure is not None:
            raise RuntimeError("the engine died") from self._engine.failure

    def __del__(self) -> None:
        """Serve calls this when the replica stops, after its requests ended or ran out of time."""
        self._engine.shutdown()


class WorkersRoot:
    """Stands before the workers: Serve allows no custom router on an application's root."""

    def __init__(self, workers: object) -> None:
        self._workers = workers
