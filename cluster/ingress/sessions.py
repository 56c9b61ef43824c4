"""The ingress's gRPC sessions with the workers, over which all tokens come."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from pagoda.proto import metrics_pb2, metrics_pb2_grpc, tokens_pb2, tokens_pb2_grpc
from pagoda.worker.block_hash import HashDomain
from pagoda.worker.cluster_tls import ClusterTls, dial
from pagoda.worker.cluster_token import ClusterToken
from pagoda.worker.errors import EngineStoppedError
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.token_stream import decode
from pagoda.worker.types import RequestId

logger = logging.getLogger(__name__)

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of pings that gRPC sends on its own, one of which may be under way
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
]
_MAX_COMMANDS = 4096
_RECONNECT_S = 0.2
_NEWS_S = 5 * _RECONNECT_S
"""A session that lasted so long is missed; after that it is only still not there."""
_SCRAPE_DEADLINE_S = 2.0


OWNED_PERIOD_S = 5.0


class WorkerLostError(EngineStoppedError):
    """The session over which a request's tokens came has ended."""


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where a worker's gRPC server listens. `boot_id` is new for each start of a worker."""

    address: str
    boot_id: str
    hash_domain: HashDomain | None = None
    """What the hashes of its blocks begin with."""

    def as_metadata(self) -> dict[str, str]:
        """What a worker publishes through Serve."""
        domain = {} if self.hash_domain is None else {"hash_domain": self.hash_domain.as_text()}
        return {"address": self.address, "boot_id": self.boot_id} | domain

    @staticmethod
    def from_metadata(metadata: dict[str, str]) -> "WorkerEndpoint | None":
        """The inverse; None if the worker has not published anything."""
        if not metadata:
            return None
        domain = metadata.get("hash_domain")
        return WorkerEndpoint(
            metadata["address"], metadata["boot_id"], None if domain is None else HashDomain.from_text(domain)
        )


class _Session:
    """A session with one worker and the requests whose tokens came over it."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[tokens_pb2.SessionCommand] = asyncio.Queue(_MAX_COMMANDS)
        self.requests: set[RequestId] = set()

    def send(self, command: tokens_pb2.SessionCommand) -> None:
        """Queue a command; one for a worker that does not read them is lost, and its session will end."""
        if not self.commands.full():
            self.commands.put_nowait(command)

    def abort(self, request_id: RequestId) -> None:
        """Tell the worker to end a request, if it has it."""
        self.send(tokens_pb2.SessionCommand(abort=tokens_pb2.Abort(request_id=request_id)))

    async def write_commands(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        """Write what is queued, until cancelled or the session ends."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # whoever reads the session hears of its end
            while True:
                await call.write(await self.commands.get())


def owned_command(request_ids: Collection[RequestId]) -> tokens_pb2.SessionCommand:
    """Tells a worker which requests are still waited for."""
    return tokens_pb2.SessionCommand(owned=tokens_pb2.Owned(request_ids=request_ids))


class WorkerSessions:
    """Keeps one session with every worker it has heard of, until that worker is gone. One event loop."""

    def __init__(
        self,
        ingress_id: str,
        *,
        token: str,
        tls: ClusterTls | None = None,
        on_session: Callable[[WorkerEndpoint, bool], None] = lambda *_: None,
        owned_period_s: float = OWNED_PERIOD_S,
    ) -> None:
        """`on_session` hears whenever a session begins (True) or has ended.

        So often as `owned_period_s` says, workers are told which requests are still waited for.
        """
        self._ingress_id = ingress_id
        self._on_session = on_session
        self._owned_period_s = owned_period_s
        self._metadata = ClusterToken(token).metadata
        self._tls = tls
        self._tasks: dict[WorkerEndpoint, asyncio.Task[None]] = {}
        self._channels: dict[WorkerEndpoint, grpc.aio.Channel] = {}
        """Of the sessions that are open or being opened."""
        self._routable: set[WorkerEndpoint] = set()
        self._outputs: dict[RequestId, PendingOutputs] = {}
        self._session_of: dict[RequestId, _Session] = {}
        self._live_sessions: set[_Session] = set()

    def set_routable(self, endpoints: Collection[WorkerEndpoint]) -> None:
        """Dial workers that are new. Sessions with those that left stay: what runs there is still draining."""
        self._routable = set(endpoints)
        for endpoint in self._routable - self._tasks.keys():
            self._tasks[endpoint] = asyncio.create_task(self._keep(endpoint))

    def open(self, request_id: RequestId) -> PendingOutputs:
        """Register a request, before it is sent. Its outputs come into what is returned."""
        outputs = self._outputs[request_id] = PendingOutputs()
        return outputs

    def close(self, request_id: RequestId) -> None:
        """Forget a request; if a token still comes for it, its worker is told to end it."""
        self._outputs.pop(request_id, None)
        if (session := self._session_of.pop(request_id, None)) is not None:
            session.requests.discard(request_id)

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        """Tell the worker that one sample is whole and needs no more tokens."""
        if (session := self._session_of.get(request_id)) is not None:
            abort = tokens_pb2.Abort(request_id=request_id, index=index, is_complete=True)
            session.send(tokens_pb2.SessionCommand(abort=abort))

    def abort_everywhere(self, request_id: RequestId) -> None:
        """Tell every worker to end a request, whichever ingress it came through."""
        for session in self._live_sessions:
            session.abort(request_id)

    async def scrape(self) -> list[str | None]:
        """What each worker has measured; None of those that do not answer in time."""
        return await asyncio.gather(*(self._scrape(self._channels.get(endpoint)) for endpoint in self._tasks))

    async def shutdown(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _scrape(self, channel: grpc.aio.Channel | None) -> str | None:
        if channel is None:
            return None
        stub = metrics_pb2_grpc.WorkerMetricsStub(channel)
        try:
            answer = await stub.Scrape(metrics_pb2.ScrapeRequest(), metadata=self._metadata, timeout=_SCRAPE_DEADLINE_S)
        # Closing a channel, as the end of its session does, cancels the calls on it.
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            return None
        return str(answer.text)

    async def _keep(self, endpoint: WorkerEndpoint) -> None:
        """Hold the session; dial again for as long as the worker is routable."""
        loop = asyncio.get_running_loop()
        last_end_s = -math.inf
        try:
            while True:
                try:
                    await self._run(endpoint)
                except grpc.aio.AioRpcError as error:
                    is_news = loop.time() - last_end_s > _NEWS_S
                    level = logging.INFO if is_news else logging.DEBUG
                    logger.log(level, "session with %s ended: %s", endpoint.address, error.details())
                    last_end_s = loop.time()
                if endpoint not in self._routable:
                    return
                await asyncio.sleep(_RECONNECT_S)
        finally:
            del self._tasks[endpoint]

    async def _run(self, endpoint: WorkerEndpoint) -> None:
        session = _Session()
        hello = tokens_pb2.SessionHello(ingress_id=self._ingress_id)
        await session.commands.put(tokens_pb2.SessionCommand(hello=hello))
        async with dial(endpoint.address, self._tls, _KEEPALIVE) as channel:
            self._channels[endpoint] = channel
            stub = tokens_pb2_grpc.TokenStreamStub(channel)
            call = stub.Session(metadata=self._metadata)
            # Our own task and not an iterator for gRPC, which leaves that waiting when the worker ends the session.
            writing = asyncio.create_task(session.write_commands(call))
            telling = asyncio.create_task(self._tell_owned(session))
            self._live_sessions.add(session)
            is_open = False
            try:
                await call.initial_metadata()
                is_open = True
                self._on_session(endpoint, True)
                async for batch in call:
                    try:
                        self._deliver(batch, session)
                    except ValueError as error:  # its requests fail, and it is dialled again
                        logger.error("the worker at %s sends what is no batch: %s", endpoint.address, error)
                        break
            finally:
                writing.cancel()
                telling.cancel()
                self._live_sessions.remove(session)
                if is_open:
                    self._on_session(endpoint, False)
                del self._channels[endpoint]
                for request_id in list(session.requests):
                    if (outputs := self._outputs.get(request_id)) is not None:
                        outputs.fail(WorkerLostError(f"the worker at {endpoint.address} is gone"))
                await asyncio.gather(writing, telling, return_exceptions=True)

    async def _tell_owned(self, session: _Session) -> None:
        while True:
            await asyncio.sleep(self._owned_period_s)
            elsewhere = self._session_of.keys() - session.requests
            session.send(owned_command(self._outputs.keys() - elsewhere))

    def _deliver(self, batch: tokens_pb2.TokenBatch, session: _Session) -> None:
        for output in decode(batch):
            if (outputs := self._outputs.get(output.request_id)) is not None:
                if output.request_id not in self._session_of:
                    self._session_of[output.request_id] = session
                    session.requests.add(output.request_id)
                outputs.put(output)
            elif output.finish_reason is None:
                # Nobody is there for it any more, but the call that runs it was not cancelled, or not yet: what Serve
                # is just handing to a worker it sometimes forgets to cancel.
                session.abort(output.request_id)
