"""A cluster of fake workers without Ray: processes that can be killed, real gRPC, a real directory, a real ingress.

What Ray Serve does for a real one is done here in a few lines: calls are carried (`DirectCalls`), ingresses are told of
the workers that there are, somewhat late, and another one is started where one has died.
"""

import asyncio
import itertools
import os
import pickle
import random
import secrets
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nursery
from fake_worker import WorkerProbe, WorkerSpec, read_message, write_message
from processes import kill

from pagoda.cluster.directory.client import DirectoryClient
from pagoda.cluster.directory.server import DirectoryServer
from pagoda.cluster.ingress.resuming_client import ResumingClient, WorkerFullError, WorkerStoppingError
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.sessions import WorkerEndpoint, WorkerLostError, WorkerSessions
from pagoda.cluster.known_workers import KnownWorkers
from pagoda.cluster.placer import Placer
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.errors import EngineStoppedError, OverloadedError, PagodaError
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import Request

MODEL = "fake"
_START_DEADLINE_S = 60.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How big, how fast, and how soon what died is missed and replaced."""

    num_workers: int = 16
    step_s: float = 0.02
    token_s: float = 0.0001
    num_blocks: int = 1500
    max_num_seqs: int = 16
    max_num_waiting: int = 512
    notice_s: float = 0.5
    """Until the ingress is told of a death by others than its own sessions."""
    replace_s: float = 1.0
    """Until the next worker begins to start."""
    reservation_s: float = 30.0
    """Until a reservation of which nobody hears ends; a directory's default."""


class LiveWorker:
    """A worker's process, and the end of its socket that stands for Serve's calls."""

    def __init__(self, process: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.endpoint: WorkerEndpoint | None = None
        """None until it is ready."""
        self.has_died = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._answers[0] = self._ready
        self._reading = asyncio.create_task(self._read())

    @property
    def is_ready(self) -> bool:
        return self.endpoint is not None and not self.has_died.is_set()

    @property
    def num_calls(self) -> int:
        return len(self._answers)

    async def become_ready(self) -> WorkerEndpoint:
        """Raises `WorkerLostError` if it dies before."""
        async with asyncio.timeout(_START_DEADLINE_S):
            self.endpoint = WorkerEndpoint.from_metadata(await self._ready)
        assert self.endpoint is not None
        return self.endpoint

    async def ask(self, kind: str, argument: Any = None) -> Any:
        """Raises `WorkerLostError` if it dies before it answers. Cancelling it cancels it over there, too."""
        if self.has_died.is_set():
            raise WorkerLostError("the worker is gone")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            write_message(self._writer, (number, kind, argument))
            return await answer
        finally:
            self._answers.pop(number, None)
            if not answer.done() or answer.cancelled():
                write_message(self._writer, (number, "cancel", None))

    async def close(self) -> None:
        kill(self.process)
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                number, answer = await read_message(self._reader)
                if (waiting := self._answers.get(number)) is not None and not waiting.done():
                    waiting.set_result(answer)
                if number == 0:
                    del self._answers[0]
        except (asyncio.IncompleteReadError, ConnectionError):
            self.has_died.set()
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(WorkerLostError("the worker is gone"))
            if not self._ready.cancelled():
                self._ready.exception()  # perhaps nobody waits for it
            self._writer.close()


class Nursery:
    """The process that workers are forked from."""

    def __init__(self, command: Callable[..., list[str]] = lambda *words: list(words)) -> None:
        """`command` may put something before the words, such as what runs them in another network."""
        self._control, theirs = socket.socketpair()
        with theirs:
            words = command(sys.executable, nursery.__file__, str(theirs.fileno()))
            # What is killed on purpose is nothing to be told of.
            quiet = os.environ | {"GRPC_VERBOSITY": "NONE"}
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=quiet)
        self._lock = asyncio.Lock()
        self._control.setblocking(False)

    async def start(self) -> None:
        """Wait until everything is imported."""
        async with asyncio.timeout(_START_DEADLINE_S):
            assert await asyncio.get_running_loop().sock_recv(self._control, 64) == nursery.READY

    async def bear(self, spec: WorkerSpec) -> LiveWorker:
        """Start a worker; it is not ready yet."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with self._lock:
            with theirs:
                socket.send_fds(self._control, [pickle.dumps(spec)], [theirs.fileno()])
            process = int(await asyncio.get_running_loop().sock_recv(self._control, 64))
        return LiveWorker(process, *await asyncio.open_connection(sock=ours))

    def close(self) -> None:
        self._control.close()
        self._process.wait(_START_DEADLINE_S)


class DirectCalls:
    """Implements `WorkerCalls` over the workers' sockets."""

    def __init__(self, workers: Callable[[], Sequence[LiveWorker]], ingress_id: str, draw: random.Random) -> None:
        self._workers = workers
        self._ingress_id = ingress_id
        self._draw = draw

    async def ping(self) -> None:
        if not self._workers():
            raise EngineStoppedError("there is no worker")

    async def run(self, request: Request, ranked: tuple[str, ...]) -> None:
        workers = {each.endpoint.boot_id: each for each in self._workers() if each.endpoint is not None}
        best = next((workers[boot_id] for boot_id in ranked if boot_id in workers), None)
        if best is None:
            if not workers:
                raise WorkerLostError("there is no worker now")
            best = self._draw.choice([*workers.values()])
        refusal = await best.ask("run", (request, self._ingress_id))
        if isinstance(refusal, EngineStoppedError):
            raise WorkerStoppingError(str(refusal))
        if isinstance(refusal, OverloadedError):
            raise WorkerFullError(str(refusal))
        if isinstance(refusal, PagodaError):
            raise refusal


class Directory:
    """A prefix directory that can be killed, and is then started again where it was."""

    def __init__(self, token: str, reservation_s: float) -> None:
        """A reservation of which nobody hears ends after `reservation_s`."""
        self._token = token
        self._reservation_s = reservation_s
        self._server: DirectoryServer | None = None
        self.port = 0

    @property
    def state(self) -> Any:
        assert self._server is not None
        return self._server.state

    async def start(self) -> None:
        self._server = DirectoryServer(token=self._token, seed=0)
        self._server.state._reservation_s = self._reservation_s
        self.port = await self._server.start(f"127.0.0.1:{self.port}")

    async def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def kill(self) -> None:
        """Everything it knew is forgotten, every connection cut."""
        assert self._server is not None
        if (keeping := self._server._keeping) is not None:
            keeping.cancel()
        await self._server._server.stop(None)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


@dataclass(slots=True)
class FakeCluster:
    """What `fake_cluster` makes. Everything but the workers runs on one event loop."""

    shape: ClusterShape
    directory: Directory
    service: InferenceService
    client: ResumingClient
    sessions: WorkerSessions
    directory_client: DirectoryClient
    known: KnownWorkers
    workers: list[LiveWorker] = field(default_factory=list)
    num_deaths: int = 0
    problems: list[str] = field(default_factory=list)
    """What workers died of that nobody killed."""

    @property
    def ready(self) -> list[LiveWorker]:
        """Workers that answer, the oldest first."""
        return [worker for worker in self.workers if worker.is_ready]

    async def until_complete(self) -> None:
        """Return once there are as many workers as there should be, and the ingress has a session with each."""
        async with asyncio.timeout(_START_DEADLINE_S):
            while len(self.ready) < self.shape.num_workers or len(self.sessions._live_sessions) < len(self.ready):
                await asyncio.sleep(_POLL_S)

    async def probe_workers(self) -> list[WorkerProbe]:
        """Of those that answer."""
        answers = await asyncio.gather(*(each.ask("probe") for each in self.ready), return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, WorkerProbe)]


@asynccontextmanager
async def fake_cluster(
    model: Path,
    shape: ClusterShape,
    *,
    directory_address: Callable[[Directory], Awaitable[str]] = lambda directory: directory.address(),
    nursed_by: Nursery | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[FakeCluster]:
    """Start a cluster that mends itself, and end it with the block.

    `directory_address` is where workers and ingress look for the directory: a proxy stands there if the network between
    is to be a bad one. `host` is where workers listen.
    """
    token, ingress_id = secrets.token_hex(), uuid.uuid4().hex
    parent = nursed_by or Nursery()
    directory = Directory(token, shape.reservation_s)
    await parent.start()
    await directory.start()
    known = KnownWorkers()
    sessions = WorkerSessions(ingress_id, token=token, on_session=known.note_session)
    address = await directory_address(directory)

    async def resolve() -> str:
        return address

    spec = WorkerSpec(
        model, MODEL, token, host, (address,), shape.step_s, shape.token_s, shape.num_blocks, shape.max_num_seqs,
        shape.max_num_waiting,
    )  # fmt: skip
    directory_client = DirectoryClient([resolve], token=token)
    placer = Placer(directory_client, MODEL, lambda: known.hash_domain, is_routable=known.is_usable)
    cluster: FakeCluster
    calls = DirectCalls(lambda: cluster.ready, ingress_id, random.Random(0))
    limits = plan_engine(spec.engine_config()).limits
    client = ResumingClient(calls, sessions, limits, placer)
    service = InferenceService(Tokenizer(model), client, limits)
    cluster = FakeCluster(shape, directory, service, client, sessions, directory_client, known)
    known.listen(sessions.set_routable)
    directory_client.start()
    keeping = [asyncio.create_task(_keep_one(cluster, parent, spec)) for _ in range(shape.num_workers)]
    try:
        await cluster.until_complete()
        yield cluster
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        for worker in cluster.workers:
            await worker.close()
        await sessions.shutdown()
        await directory_client.close()
        await directory.stop()
        service.close()
        parent.close()


async def _keep_one(cluster: FakeCluster, parent: Nursery, spec: WorkerSpec) -> None:
    """One worker after the other: Serve's controller."""
    while True:
        worker = await parent.bear(spec)
        cluster.workers.append(worker)
        with suppress(WorkerLostError):
            endpoint = await worker.become_ready()
            known = {each.endpoint for each in cluster.ready if each.endpoint is not None}
            cluster.known.update(frozenset(known | {endpoint}))
            await worker.has_died.wait()
        cluster.workers.remove(worker)
        cluster.num_deaths += 1
        await asyncio.sleep(cluster.shape.notice_s)
        cluster.known.update(frozenset(each.endpoint for each in cluster.ready if each.endpoint is not None))
        await asyncio.sleep(cluster.shape.replace_s)
