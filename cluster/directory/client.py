"""Asks directories where requests should go. Never an error and never late: without an answer in time there is None.

All ingress processes ask the same directory of a model first, so that reservations meet in one place. One that does
not answer is left alone for a while, and the next one asked; it is told of the requests that are on their way.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import grpc

from pagoda.cluster.directory.publisher import CHANNEL_OPTIONS, Resolve
from pagoda.proto import directory_pb2 as pb
from pagoda.proto import directory_pb2_grpc
from pagoda.worker.block_hash import BlockHash
from pagoda.worker.cluster_tls import ClusterTls, dial
from pagoda.worker.cluster_token import ClusterToken

logger = logging.getLogger(__name__)

PLACE_DEADLINE_S = 0.05
_REST_S = (0.1, 2.0)
"""How long a directory that failed is left alone: the shortest and the longest, doubled each time, and drawn from."""
_MAX_LATE = 3
"""Answers in a row that do not come in time, before a directory is left alone."""
_CONNECT_DEADLINE_S = 2.0
_RELEASE_DEADLINE_S = 1.0
_ASK_DEADLINE_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """A request to be placed."""

    request_id: str
    model: str
    hashes: Sequence[BlockHash]
    num_tokens: int
    num_samples: int = 1
    max_output_tokens: int = 0

    def as_proto(self, *, exclude: Collection[str] = (), placed_on: str = "") -> pb.PlaceRequest:
        return pb.PlaceRequest(
            request_id=self.request_id,
            model=self.model,
            hashes=b"".join(self.hashes),
            num_tokens=self.num_tokens,
            num_samples=self.num_samples,
            max_output_tokens=self.max_output_tokens,
            exclude=exclude,
            placed_on=placed_on,
        )


class _Directory:
    """One of them: its channel, and whether it is asked."""

    def __init__(self, number: int, resolve: Resolve, tls: ClusterTls | None) -> None:
        self.number = number
        self._tls = tls
        self._resolve = resolve
        self._channel: grpc.aio.Channel | None = None
        self.stub: directory_pb2_grpc.DirectoryStub | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._rest_until_s = 0.0
        self._rest_s = _REST_S[0]
        self._num_late = 0

    def is_usable(self, now_s: float) -> bool:
        """Whether it can be asked now; if not, it is dialled in the background."""
        if now_s < self._rest_until_s:
            return False
        if self.stub is not None:
            return True
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        return False

    def has_answered(self) -> None:
        self._rest_s = _REST_S[0]
        self._num_late = 0

    def is_late_again(self) -> bool:
        """It did not answer in time; whether that is a habit by now."""
        self._num_late += 1
        return self._num_late >= _MAX_LATE

    def rest(self, now_s: float, draw: float) -> None:
        """Leave it alone for a while, if it is not already: many calls may fail at once."""
        if now_s < self._rest_until_s:
            return
        self._rest_until_s = now_s + self._rest_s * (0.5 + draw / 2)
        self._rest_s = min(2 * self._rest_s, _REST_S[1])

    async def _connect(self) -> None:
        try:
            address = await asyncio.wait_for(self._resolve(), _CONNECT_DEADLINE_S)
            channel = dial(address, self._tls, CHANNEL_OPTIONS)
            try:
                await asyncio.wait_for(channel.channel_ready(), _CONNECT_DEADLINE_S)
            except BaseException:
                await channel.close()
                raise
            self._channel, self.stub = channel, directory_pb2_grpc.DirectoryStub(channel)
        except Exception as error:  # noqa: BLE001  (whatever it is, requests go on without)
            logger.debug("directory %d cannot be reached: %s", self.number, error)
            self.rest(time.monotonic(), random.random())

    async def close(self) -> None:
        if self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()
        channel, self._channel, self.stub = self._channel, None, None
        if channel is not None:
            await channel.close()


class DirectoryClient:
    """For one ingress process. Make and use it on one event loop."""

    def __init__(
        self,
        directories: Sequence[Resolve],
        *,
        token: str | None = None,
        tls: ClusterTls | None = None,
        deadline_s: float = PLACE_DEADLINE_S,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`deadline_s` is for one `place`, over all directories that it asks."""
        self._directories = [_Directory(number, resolve, tls) for number, resolve in enumerate(directories)]
        self._metadata = ClusterToken(token).metadata
        self._asking = {"timeout": _ASK_DEADLINE_S, "metadata": self._metadata}
        self._deadline_s = deadline_s
        self._draw = draw
        self._open: dict[str, tuple[PlacementQuery, str, int]] = {}
        """Requests that no worker has begun: query, worker, and the directory that knows of it."""
        self._background: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to dial, so that the first request finds somebody to ask."""
        for directory in self._directories:
            directory.is_usable(time.monotonic())

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for directory in self._directories:
            await directory.close()

    async def place(self, query: PlacementQuery, *, exclude: Collection[str] = ()) -> pb.PlaceResponse | None:
        """Where the request should go; its load is reserved there until `begun` or `gone`. None if nobody can say."""
        end_s = time.monotonic() + self._deadline_s
        request = query.as_proto(exclude=exclude)
        before = self._open.pop(query.request_id, None)
        usable = [each for each in self._in_order(query.model) if each.is_usable(time.monotonic())]
        for index, directory in enumerate(usable):
            now_s, stub = time.monotonic(), directory.stub
            if now_s >= end_s or stub is None:
                continue
            timeout_s = (end_s - now_s) / (len(usable) - index)  # something is left for the others
            try:
                response: pb.PlaceResponse = await stub.Place(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if directory.stub is stub:  # else it has been noted
                    self._note_failure(directory, query, error)
                continue
            except (asyncio.CancelledError, grpc.aio.UsageError):  # so end calls on a channel that is closed
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    self._spawn(self._release(directory, query.request_id))
                    raise
                continue
            directory.has_answered()
            self._open[query.request_id] = (query, response.ranked[0], directory.number)
            if before is not None and before[2] != directory.number:
                self._spawn(self._release(self._directories[before[2]], query.request_id))
            return response
        if before is not None:
            self._spawn(self._release(self._directories[before[2]], query.request_id))
        return None

    async def stats(self) -> pb.DirectoryStats | None:
        """Of the first directory that answers; None if none does."""
        return await self._ask("", lambda stub: stub.Stats(pb.StatsRequest(), **self._asking))

    async def lookup(self, model: str, hashes: Sequence[BlockHash]) -> pb.LookupResponse | None:
        """Who holds how much of a prompt; None if nobody can say."""
        request = pb.LookupRequest(model=model, hashes=b"".join(hashes))
        return await self._ask(model, lambda stub: stub.Lookup(request, **self._asking))

    async def _ask(self, model: str, call: Callable[[Any], Awaitable[T]]) -> T | None:
        """For people, who can wait a little."""
        for directory in self._in_order(model):
            if directory.is_usable(time.monotonic()) and directory.stub is not None:
                try:
                    return await call(directory.stub)
                except grpc.aio.AioRpcError as error:
                    logger.debug("directory %d: %s", directory.number, error.details())
                except (asyncio.CancelledError, grpc.aio.UsageError):  # its channel was closed
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise
        return None

    def begun(self, request_id: str) -> None:
        """A worker has it, and says so to the directories itself."""
        self._open.pop(request_id, None)

    def gone(self, request_id: str) -> None:
        """No worker has taken it, or nobody knows: what was reserved is given up."""
        if (opened := self._open.pop(request_id, None)) is not None:
            directory = self._directories[opened[2]]
            if directory.stub is not None:
                self._spawn(self._release(directory, request_id))

    def _in_order(self, model: str) -> list[_Directory]:
        """By rendezvous: the same order in every process, and another one for another model."""
        return sorted(self._directories, key=lambda each: sha256(f"{model} {each.number}".encode()).digest())

    def _note_failure(self, directory: _Directory, query: PlacementQuery, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        logger.debug("directory %d: %s: %s", directory.number, code.name, error.details())
        if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            return  # it works; it only knows no worker yet, or not such requests
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # it may have reserved
            self._spawn(self._release(directory, query.request_id))
            if not directory.is_late_again():
                return  # perhaps it was this process that had too much to do
            directory.rest(time.monotonic(), self._draw())
        else:
            directory.rest(time.monotonic(), self._draw())
            self._spawn(directory.close())
        self._tell_others(directory)

    def _tell_others(self, lost: _Directory) -> None:
        """Reservations that only a lost directory knew of are made again at another."""
        now_s = time.monotonic()
        for request_id, (query, worker_id, number) in list(self._open.items()):
            if number != lost.number:
                continue
            for other in self._in_order(query.model):
                if other is not lost and other.is_usable(now_s):
                    self._open[request_id] = (query, worker_id, other.number)
                    self._spawn(self._restore(other, query, worker_id))
                    break

    async def _restore(self, directory: _Directory, query: PlacementQuery, worker_id: str) -> None:
        try:
            if directory.stub is not None:
                request = query.as_proto(placed_on=worker_id)
                await directory.stub.Place(request, timeout=_RELEASE_DEADLINE_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            logger.debug("a reservation is lost: %s", error.details())

    async def _release(self, directory: _Directory, request_id: str) -> None:
        try:
            if directory.stub is not None:
                request = pb.ReleaseRequest(request_ids=[request_id])
                await directory.stub.Release(request, timeout=_RELEASE_DEADLINE_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:  # its deadline ends it
            logger.debug("a reservation is not released: %s", error.details())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
