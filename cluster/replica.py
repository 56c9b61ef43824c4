"""What one worker replica does, apart from being a Ray Serve deployment (which `app.py` makes of it)."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from pagoda.cluster.directory.publisher import DirectoryPublisher, Resolve
from pagoda.cluster.ingress.sessions import WorkerEndpoint
from pagoda.cluster.logs import LogLevel, log_through_serve
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.cluster_tls import ClusterTls
from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import InvalidRequestError, OverloadedError, PagodaError, RankLostError
from pagoda.worker.load_report import LoadReport
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.server import SessionLostError, WorkerServer
from pagoda.worker.tensor_parallel import RankPlaces, StartRanks
from pagoda.worker.types import Request

logger = logging.getLogger(__name__)


class Worker:
    """Owns one engine and the gRPC server over which its tokens leave."""

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        token: str,
        own_address: Callable[[], str],
        directories: Sequence[Resolve],
        log_level: LogLevel,
        start_ranks: StartRanks,
        tls: ClusterTls | None = None,
    ) -> None:
        """`own_address` gives the address of this host that ingress processes can dial; `token` is theirs to show.

        What happens in the cache of `model_name` is told to the `directories`. `start_ranks` starts the processes of
        all ranks but this one, if there are others. `tls` is for all connections of the cluster.
        """
        log_through_serve(log_level)
        self._boot_id = uuid.uuid4().hex
        self._token = token
        self._tls = tls
        self._own_address = own_address
        self._engine = AsyncEngine(
            config,
            progress=lambda what, done, total: logger.debug("%s %d/%d", what, done, total),
            name=self._boot_id,
            on_report=self._on_report if directories else None,
            rank_places=RankPlaces(own_address(), start_ranks),
            on_lost=_end_replica,
        )
        self._config = config
        self._model_name = model_name
        self._directories = directories
        self._publisher: DirectoryPublisher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: WorkerServer | None = None

    async def record_replica_metadata(self) -> dict[str, str]:
        """Serve calls this once the worker is made, and hands the result to every router."""
        self._server = WorkerServer(self._engine, token=self._token, tls=self._tls)
        address = await self._server.start(self._own_address())
        domain = self._engine.hash_domain
        if self._directories and self._publisher is None:
            self._loop = asyncio.get_running_loop()
            hello = pb.Hello(
                worker_id=self._boot_id,
                epoch=time.time_ns(),
                model=self._model_name,
                fingerprint=domain.root(),
                block_size=domain.block_size,
                windows=self._engine.announced_windows,
                num_blocks=self._engine.num_token_blocks,
                max_num_seqs=self._engine.limits.max_num_seqs,
                layout=self._engine.layout.fingerprint(),
                tensor_parallel_size=self._engine.layout.tensor_parallel_size,
            )
            self._publisher = DirectoryPublisher(hello, self._directories, token=self._token, tls=self._tls)
            self._publisher.start()
        return WorkerEndpoint(address, self._boot_id, domain).as_metadata()

    async def ping(self) -> None:
        """Answers."""

    async def stats(self) -> SchedulerStats:
        return self._engine.stats()

    async def run_request(
        self,
        request: Request,
        ingress_id: str,
        ranked: tuple[str, ...] = (),  # noqa: ARG002  (for the router)
    ) -> AsyncIterator[PagodaError | None]:
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

    def _on_report(self, report: LoadReport) -> None:
        """Engine thread. What happens before somebody listens is only the loading of the model."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._publish, report)

    def _publish(self, report: LoadReport) -> None:
        if self._publisher is not None:
            load, rates = report.load, report.rates
            update = pb.LoadReport(
                num_uncached_tokens=load.num_uncached_tokens,
                num_uncached_pairs=load.num_uncached_pairs,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_free_blocks=load.num_free_blocks,
                num_empty_blocks=load.num_empty_blocks,
                rates=pb.Rates(**asdict(rates)),
            )
            self._publisher.publish(report.events, update, admitted=report.admitted, finished=report.finished)

    def __del__(self) -> None:
        """Serve calls this when the replica stops, after its requests ended or ran out of time."""
        self._engine.shutdown()


def _end_replica(error: RankLostError) -> None:
    """At once, as when a worker is killed: its requests go on at another one."""
    logger.error("%s; the replica ends, and all its ranks", error)
    logging.shutdown()
    os._exit(1)


class WorkersRoot:
    """Stands before the workers: Serve allows no custom router on an application's root."""

    def __init__(self, workers: object) -> None:
        self._workers = workers
