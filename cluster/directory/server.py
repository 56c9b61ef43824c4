"""The directory's gRPC server: an adapter around `DirectoryState`, on one event loop."""

import asyncio
import gc
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagoda.cluster.directory.checks import MismatchError, StaleEpochError, UnknownModelError
from pagoda.cluster.directory.state import DirectoryState
from pagoda.cluster.tolerant_server import TolerantServer, UnreadableRequest
from pagoda.proto import directory_pb2 as pb
from pagoda.proto import directory_pb2_grpc
from pagoda.worker.cluster_tls import ClusterTls, listen
from pagoda.worker.cluster_token import ClusterToken
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import shortened

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 2**20
_TICK_S = 0.1
_STOP_GRACE_S = 0.5
_MAX_QUEUED_ACKS = 64
_HELLO_DEADLINE_S = 5.0
_WATCH_MS = (100, 60_000, 1_000)
_STATUS = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    StaleEpochError: grpc.StatusCode.ABORTED,
    MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
}
SERVICE = pb.DESCRIPTOR.services_by_name["Directory"].full_name
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Workers and ingresses ping to notice a directory that is gone; unasked, gRPC takes that for an attack.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # Calls that have come and wait for their turn; beyond it, by default from 1,000 on, some are answered CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
]
_EXPECTED = (InvalidRequestError, UnknownModelError, StaleEpochError, MismatchError)
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class DirectoryServer(directory_pb2_grpc.DirectoryServicer):
    """Serves one directory. Make and use it on one event loop."""

    def __init__(
        self,
        *,
        token: str | None = None,
        tls: ClusterTls | None = None,
        seed: int | None = None,
        lease_s: float = 3.0,
    ) -> None:
        """Callers must show `token`, and the certificate of `tls`, if there are any. `seed` is that of draws between
        equals.
        """
        self._token = ClusterToken(token)
        self._tls = tls
        self.state = DirectoryState(
            uuid.uuid4().hex, now_s=time.monotonic(), draw=random.Random(seed).random, lease_s=lease_s
        )
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        directory_pb2_grpc.add_DirectoryServicer_to_server(self, TolerantServer(self._server))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, address: str) -> int:
        """Listen on host:port; port 0 takes a free one. Returns the port. Raises `RuntimeError` if it is taken."""
        gc.collect()
        gc.freeze()  # what is here by now stays, so nobody needs to look through it again and again
        port = listen(self._server, address, self._tls)
        await self._server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._keeping = asyncio.create_task(self._keep())
        return port

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_STOP_GRACE_S)

    async def wait(self) -> None:
        """Until it is stopped."""
        await self._server.wait_for_termination()

    async def _keep(self) -> None:
        """End what is over, and sweep in pieces between which others have their turn."""
        while True:
            until_s = time.monotonic() + _TICK_S
            try:
                self.state.tick(time.monotonic())
                while time.monotonic() < until_s and self.state.workers.sweep():  # noqa: ASYNC110  (there is no event)
                    await asyncio.sleep(0)
            except Exception:
                logger.exception("keeping the directory")
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    # -- calls -----------------------------------------------------------------------------------

    async def Publish(
        self, request_iterator: AsyncIterator[pb.WorkerUpdate], context: Context
    ) -> AsyncIterator[pb.DirectoryAck]:
        """A worker's stream; see the proto."""
        await self._token.check(context)
        acks: asyncio.Queue[pb.DirectoryAck | Exception | None] = asyncio.Queue(_MAX_QUEUED_ACKS)
        reading = asyncio.create_task(self._read_updates(request_iterator, acks))
        try:
            while (ack := await acks.get()) is not None:
                if isinstance(ack, Exception):
                    await self._abort(context, ack)
                else:
                    yield ack
        finally:
            reading.cancel()

    async def _read_updates(
        self,
        updates: AsyncIterator[pb.WorkerUpdate],
        acks: "asyncio.Queue[pb.DirectoryAck | Exception | None]",
    ) -> None:
        try:
            try:
                async with asyncio.timeout(_HELLO_DEADLINE_S):
                    first = _readable(await anext(aiter(updates), pb.WorkerUpdate()))
            except TimeoutError:
                first = pb.WorkerUpdate()
            if first.WhichOneof("update") != "hello":
                raise InvalidRequestError("update", "a stream begins with hello")
            record, stream, ack = self.state.workers.hello(first.hello, time.monotonic())
            await acks.put(ack)
            async for update in updates:
                if not self.state.workers.is_current(record, stream):
                    raise StaleEpochError("stream: the worker was forgotten, or has opened another one")
                answer = self.state.workers.update(record, _readable(update), time.monotonic())
                if answer is not None:
                    await acks.put(answer)
            await acks.put(None)
        except _EXPECTED as error:
            logger.warning("a worker's stream ends: %s", error)
            await acks.put(error)
        except grpc.aio.AioRpcError:
            await acks.put(None)
        except Exception as error:
            logger.exception("a worker's stream ends")
            await acks.put(error)

    async def Place(self, request: pb.PlaceRequest, context: Context) -> pb.PlaceResponse:
        await self._admit(request, context)
        try:
            response = self.state.place(request, time.monotonic())
        except (InvalidRequestError, UnknownModelError) as error:
            await self._abort(context, error)
        if logger.isEnabledFor(logging.DEBUG):
            plan = response.plan
            logger.debug(
                "placement request=%s worker=%s reason=%s tokens=%d cached=%d queue_s=%.4f prefill_s=%.4f "
                "block_wait_s=%.4f decode_penalty_s=%.4f eviction_s=%.4f crowding_s=%.4f",
                request.request_id, response.ranked[0], response.reason, request.num_tokens, plan.cached_tokens,
                plan.queue_s, plan.prefill_s, plan.block_wait_s, plan.decode_penalty_s, plan.eviction_s,
                plan.crowding_s,
            )  # fmt: skip
        return response

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        await self._admit(request, context)
        self.state.release(request)
        return pb.ReleaseResponse()

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        await self._admit(request, context)
        try:
            return self.state.lookup(request, time.monotonic())
        except (InvalidRequestError, UnknownModelError) as error:
            await self._abort(context, error)

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.DirectoryStats:
        await self._admit(request, context)
        return self.state.stats(time.monotonic())

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.DirectoryStats]:
        await self._admit(request, context)
        least, most, default = _WATCH_MS
        period_ms = request.period_ms or default
        if not least <= period_ms <= most:
            await self._abort(context, InvalidRequestError("period_ms", f"must be between {least} and {most}"))
        while True:
            yield self.state.stats(time.monotonic())
            await asyncio.sleep(period_ms / 1e3)

    async def _abort(self, context: Context, error: Exception) -> NoReturn:
        code = _STATUS.get(type(error), grpc.StatusCode.INTERNAL)
        await context.abort(code, shortened(str(error)) if type(error) in _STATUS else "internal error; see the log")
        raise AssertionError("abort raises")

    async def _admit(self, request: Any, context: Context) -> None:
        """End the call unless it shows the token and is one."""
        await self._token.check(context)
        if isinstance(request, UnreadableRequest):
            await self._abort(context, InvalidRequestError("request", request.problem))


def _readable(update: Any) -> pb.WorkerUpdate:
    """Raises `InvalidRequestError` if it is none."""
    if isinstance(update, UnreadableRequest):
        raise InvalidRequestError("update", update.problem)
    assert isinstance(update, pb.WorkerUpdate)
    return update
