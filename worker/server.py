"""A worker's gRPC server: streams the tokens of running requests to the ingress processes that asked for them.

    ingress                                    worker
       | -- Session(hello) ---------------------> |      one per ingress process and worker
       | -- run_request (a Ray Serve call) -----> | -- engine
       | <-- the request is taken --------------- |
       | <---------- TokenBatch, one a step ----- | <-- outputs
       | -- abort, or: a sample is whole -------> |
       | -- owned: what it still waits for -----> |      every few seconds; ends what nobody owns
       | <-- run_request returns ---------------- |      when every sample has ended

A session that ends takes its ingress's requests with it. No Ray in here: the call comes through `run_request`.
Besides, any ingress may ask what the worker has measured.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc

from pagoda.proto import metrics_pb2, metrics_pb2_grpc, tokens_pb2, tokens_pb2_grpc
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.cluster_tls import ClusterTls, listen
from pagoda.worker.cluster_token import ClusterToken
from pagoda.worker.errors import EngineStoppedError
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.token_stream import encode_in_batches
from pagoda.worker.tolerant_server import TolerantServer, UnreadableRequest
from pagoda.worker.types import FinishReason, Request, RequestId, SequenceOutput

logger = logging.getLogger(__name__)

SESSION_DEADLINE_S = 5.0
"""How long a request waits for its ingress's session, which may still be on its way when a worker has just started."""
_STOP_GRACE_S = 1.0
_SERVER_OPTIONS = [
    # Ingresses ping while no token flows, to notice a dead worker. Unasked, gRPC takes more than two pings without data
    # in ten minutes for an attack and ends the connection, with all that runs over it.
    ("grpc.http2.max_ping_strikes", 0),
]


class SessionLostError(EngineStoppedError):
    """The ingress that asked for a request has no session with this worker."""


class _Session:
    """One ingress's session."""

    def __init__(self) -> None:
        self.outputs = PendingOutputs()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests: set[RequestId] = set()
        """That it runs for its ingress."""
        self._unowned: set[RequestId] = set()

    def end(self, error: SessionLostError) -> None:
        """Nothing is read from it any more. May be called twice."""
        self.outputs.fail(error)
        if not self.ended.done():
            self.ended.set_result(None)

    def sweep(self, owned: Collection[str]) -> set[RequestId]:
        """Of its requests, those that are nobody's for the second time in a row."""
        unowned = self.requests.difference(owned)  # the first time, one may have come after its ingress spoke
        self._unowned, gone = unowned, unowned & self._unowned
        return gone


class WorkerServer(tokens_pb2_grpc.TokenStreamServicer, metrics_pb2_grpc.WorkerMetricsServicer):
    """Serves one engine. Everything runs on one event loop, the one it is made on."""

    def __init__(self, engine: AsyncEngine, *, token: str, tls: ClusterTls | None = None) -> None:
        """`token` is what callers must show, and the certificate of `tls`."""
        self._engine = engine
        self._token = ClusterToken(token)
        self._tls = tls
        self._sessions: defaultdict[str, asyncio.Future[_Session]] = defaultdict(
            asyncio.get_running_loop().create_future
        )
        """By ingress id; pending while a request is here before its session."""
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        tolerant = TolerantServer(self._server)
        tokens_pb2_grpc.add_TokenStreamServicer_to_server(self, tolerant)
        metrics_pb2_grpc.add_WorkerMetricsServicer_to_server(self, tolerant)

    async def start(self, host: str) -> str:
        """Listen on a free port of `host`. Returns the address to dial."""
        port = listen(self._server, f"{host}:0", self._tls)
        await self._server.start()
        return f"{host}:{port}"

    async def stop(self) -> None:
        await self._server.stop(_STOP_GRACE_S)

    async def run_request(self, request: Request, ingress_id: str) -> None:
        """Run a request to its end, its outputs going to the ingress's session. Cancelling it aborts the request.

        Raises as `Engine.add` does, and `SessionLostError` if the session does not come or ends.
        """
        try:
            session = await asyncio.wait_for(asyncio.shield(self._sessions[ingress_id]), SESSION_DEADLINE_S)
        except TimeoutError:
            raise SessionLostError(f"no session from ingress {ingress_id}") from None
        running = asyncio.ensure_future(self._engine.run(request, session.outputs.put))
        session.requests.add(request.request_id)
        try:
            await asyncio.sleep(0)  # by then it is refused, or running waits for its first output
            if not running.done() and not request.runs_alone:
                session.outputs.put(SequenceOutput(request.request_id, request.live_samples[0], ()))
            await asyncio.wait({running, session.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise SessionLostError(f"the session of ingress {ingress_id} ended")
            running.result()
        finally:
            running.cancel()
            session.requests.discard(request.request_id)

    async def Session(
        self, request_iterator: AsyncIterator[tokens_pb2.SessionCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[tokens_pb2.TokenBatch]:
        """One ingress's session; see the proto."""
        await self._token.check(context)
        first = await anext(request_iterator, tokens_pb2.SessionCommand())
        if isinstance(first, UnreadableRequest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: {first.problem}")
        ingress_id = first.hello.ingress_id
        if not ingress_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello.ingress_id: missing")
        session = _Session()
        if (place := self._sessions.get(ingress_id)) is not None and place.done():
            # The ingress has given that one up. Over a network that has lost packets, we would hear of it much later.
            place.result().end(SessionLostError("the ingress has opened another session"))
            del self._sessions[ingress_id]
        place = self._sessions[ingress_id]
        place.set_result(session)
        await context.send_initial_metadata(())  # else the ingress would hear of its session with the first token
        reading = asyncio.create_task(self._read_commands(request_iterator, session))
        try:
            while True:
                for batch in encode_in_batches(await session.outputs.take()):
                    yield batch
        except SessionLostError:
            return
        finally:
            if self._sessions.get(ingress_id) is place:
                del self._sessions[ingress_id]
            session.end(SessionLostError("the session has ended"))
            reading.cancel()

    async def Scrape(
        self,
        request: metrics_pb2.ScrapeRequest,  # noqa: ARG002  (it says nothing)
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> metrics_pb2.Exposition:
        """What the worker has measured; see the proto."""
        await self._token.check(context)
        return metrics_pb2.Exposition(text=self._engine.metrics_exposition())

    async def _read_commands(self, commands: AsyncIterator[tokens_pb2.SessionCommand], session: _Session) -> None:
        try:
            async for command in commands:
                if isinstance(command, UnreadableRequest):
                    break  # who sends such things may mean something else by the others
                if command.HasField("abort"):
                    abort = command.abort
                    index = abort.index if abort.HasField("index") else None
                    reason = FinishReason.STOP if abort.is_complete else FinishReason.ABORT
                    self._engine.abort(RequestId(abort.request_id), index, reason)
                elif command.HasField("owned"):
                    for request_id in session.sweep(command.owned.request_ids):
                        logger.warning("request %s is nobody's, and ends", request_id)
                        self._engine.abort(request_id)
        finally:
            session.outputs.fail(SessionLostError("the ingress closed its session"))
