"""Tells directories what a worker holds and how much it has to do: one stream to each, kept for as long as it lives.

    dial --> hello --> ack: "I have you up to batch n" --> n+1, n+2, ... as they come, and load reports between
                 ^                                              |
                 +------ jittered pause <---- stream ends ------+

What a directory lacks comes from the journal of recent batches, and where that reaches not far enough from a snapshot,
which carries the number of the batch after which it holds. A slow directory delays nobody: each stream has a place in
the journal, and one that falls behind it gets a snapshot.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from pagoda.proto import directory_pb2 as pb
from pagoda.proto import directory_pb2_grpc
from pagoda.worker.block_hash import BlockHash
from pagoda.worker.cluster_tls import ClusterTls, dial
from pagoda.worker.cluster_token import ClusterToken
from pagoda.worker.kv_events import AllBlocksCleared, BlockStored, KVEvent

logger = logging.getLogger(__name__)

Resolve = Callable[[], Awaitable[str]]
"""Where a directory listens, host:port. May raise if it cannot be told now."""

MAX_JOURNAL_BATCHES = 4096
MAX_JOURNAL_BLOCKS = 262_144
"""4 MiB of hashes. Together with the other bound: some minutes of a busy worker."""
SNAPSHOT_BLOCKS = 8192
"""Of one message."""
FLUSH_PERIOD_S = 0.025
"""So long what happens is gathered; the directory's own predictions and reservations bridge it."""
REPORT_PERIOD_S = 0.5
"""At the latest; so often a directory hears of a worker that does nothing."""
_IDLE_DECAY = 0.9
"""Of how busy a worker is said to be, with each period without news."""
_MAX_UNTOLD = 4096
"""Requests whose coming or going a directory that does not answer is told later; reservations have a deadline too."""
_DEADLINE_S = 5.0
_RECONNECT_S = (0.05, 1.0)
"""The shortest and the longest pause; doubled each time, and drawn from."""
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
]


class Journal:
    """The latest batches of events, and all that they have come to. Pure."""

    def __init__(self, *, max_batches: int = MAX_JOURNAL_BATCHES, max_blocks: int = MAX_JOURNAL_BLOCKS) -> None:
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._batches: deque[tuple[int, Sequence[KVEvent]]] = deque()
        """(blocks, events), the last one being number `last_seq`."""
        self._num_blocks = 0
        self._held: dict[int, dict[BlockHash, None]] = {}
        self.last_seq = 0

    @property
    def first_seq(self) -> int:
        """Of the batches that are still here."""
        return self.last_seq - len(self._batches) + 1

    def append(self, events: Sequence[KVEvent]) -> None:
        """The next batch."""
        num_blocks = 0
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._held.clear()
                continue
            num_blocks += len(event.hashes)
            held = self._held.setdefault(event.group, {})
            if isinstance(event, BlockStored):
                held.update(dict.fromkeys(event.hashes))
            else:
                for block_hash in event.hashes:
                    held.pop(block_hash, None)
        self._batches.append((num_blocks, events))
        self._num_blocks += num_blocks
        self.last_seq += 1
        while len(self._batches) > self._max_batches or self._num_blocks > self._max_blocks:
            self._num_blocks -= self._batches.popleft()[0]

    def batch(self, seq: int) -> Sequence[KVEvent]:
        """A batch that is still here."""
        return self._batches[seq - self.first_seq][1]

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """(group, concatenated hashes) of all that is held after `last_seq`, in pieces."""
        for group, held in self._held.items():
            hashes = list(held)
            for start in range(0, len(hashes), SNAPSHOT_BLOCKS):
                yield group, b"".join(hashes[start : start + SNAPSHOT_BLOCKS])


class DirectoryPublisher:
    """One worker's streams. Make and use it on one event loop."""

    def __init__(
        self,
        hello: pb.Hello,
        directories: Iterable[Resolve],
        *,
        token: str | None = None,
        tls: ClusterTls | None = None,
        journal: Journal | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`hello` describes the worker; `token` is what directories want to see."""
        self._hello = hello
        self._metadata = ClusterToken(token).metadata
        self._tls = tls
        self._journal = Journal() if journal is None else journal
        self._draw = draw
        self._report = pb.LoadReport(num_free_blocks=hello.num_blocks, num_empty_blocks=hello.num_blocks)
        self._live: dict[str, None] = {}
        self._streams = [_Stream(resolve) for resolve in directories]
        self._tasks: list[asyncio.Task[None]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._pending: list[KVEvent] = []
        self._has_news = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(stream)) for stream in self._streams]
        self._flushing = asyncio.create_task(self._flush())

    async def stop(self) -> None:
        """Say goodbye to those that listen."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._send_news()
        for stream in self._streams:
            stream.is_leaving = True
            stream.changed.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def publish(
        self,
        events: Sequence[KVEvent],
        report: pb.LoadReport,
        *,
        admitted: Iterable[str] = (),
        finished: Iterable[str] = (),
    ) -> None:
        """What a step has brought. `report` is the load as it is now, the `admitted` contained; its lists are empty."""
        self._pending.extend(events)
        self._report = report
        admitted, finished = list(admitted), list(finished)
        self._live.update(dict.fromkeys(admitted))
        for request_id in finished:
            self._live.pop(request_id, None)
        for stream in self._streams:
            if len(stream.admitted) + len(stream.finished) + len(admitted) + len(finished) > _MAX_UNTOLD:
                stream.is_complete = True
            stream.admitted.extend(admitted)
            stream.finished.extend(finished)
        self._has_news.set()

    async def _flush(self) -> None:
        """What has gathered goes out, and then nothing for a while: for every step would be a message too many."""
        while True:
            try:
                await asyncio.wait_for(self._has_news.wait(), REPORT_PERIOD_S)
            except TimeoutError:
                self._report.rates.busy_ratio *= _IDLE_DECAY
            self._has_news.clear()
            self._send_news()
            await asyncio.sleep(FLUSH_PERIOD_S)

    def _send_news(self) -> None:
        if self._pending:
            self._journal.append(self._pending)
            self._pending = []
        for stream in self._streams:
            stream.has_report = True
            stream.changed.set()

    async def _keep(self, stream: "_Stream") -> None:
        pause_s = _RECONNECT_S[0]
        while not stream.is_leaving:
            stream.is_accepted = False
            try:
                address = await asyncio.wait_for(stream.resolve(), _DEADLINE_S)
                async with dial(address, self._tls, CHANNEL_OPTIONS) as channel:
                    await self._run(stream, channel)
            except grpc.aio.AioRpcError as error:
                log = logger.warning if error.code() is grpc.StatusCode.FAILED_PRECONDITION else logger.debug
                log("a directory does not take this worker: %s: %s", error.code().name, error.details())
            except Exception as error:  # noqa: BLE001  (whatever a directory does, the worker goes on)
                logger.debug("no directory: %s", error)
            if stream.is_accepted:
                pause_s = _RECONNECT_S[0]
            if not stream.is_leaving:
                await asyncio.sleep(pause_s * (0.5 + self._draw() / 2))
                pause_s = min(2 * pause_s, _RECONNECT_S[1])

    async def _run(self, stream: "_Stream", channel: grpc.aio.Channel) -> None:
        """One stream until it ends."""
        call = directory_pb2_grpc.DirectoryStub(channel).Publish(metadata=self._metadata)
        reading: asyncio.Task[None] | None = None
        try:
            hello = pb.Hello()
            hello.CopyFrom(self._hello)
            hello.last_seq = self._journal.last_seq
            await asyncio.wait_for(call.write(pb.WorkerUpdate(hello=hello)), _DEADLINE_S)
            ack = await asyncio.wait_for(call.read(), _DEADLINE_S)
            if ack is grpc.aio.EOF:
                await call.code()
                raise ConnectionError(await call.details())
            stream.begin(ack)
            reading = asyncio.create_task(_read_acks(call, stream))
            while not stream.is_ended:
                await self._send_what_it_lacks(call, stream)
                if stream.is_leaving:
                    await call.write(pb.WorkerUpdate(goodbye=pb.Goodbye()))
                    await call.done_writing()
                    break
                await stream.changed.wait()
                stream.changed.clear()
        finally:
            if reading is not None:
                reading.cancel()
            call.cancel()

    async def _send_what_it_lacks(self, call: Any, stream: "_Stream") -> None:
        journal = self._journal
        while not stream.is_ended and (stream.next_seq <= journal.last_seq or stream.wants_snapshot):
            if stream.wants_snapshot or stream.next_seq < journal.first_seq:
                stream.wants_snapshot = False
                stream.next_seq = journal.last_seq + 1
                for update in self._snapshot():
                    await call.write(update)
                continue
            seq = stream.next_seq
            stream.next_seq += 1  # before the write, since a complaint may set it back meanwhile
            batch = pb.EventBatch(epoch=self._hello.epoch, seq=seq, events=map(_event, journal.batch(seq)))
            await call.write(pb.WorkerUpdate(events=batch))
        if stream.has_report:
            stream.has_report = False
            await call.write(pb.WorkerUpdate(load=stream.load_report(self._report, self._live)))

    def _snapshot(self) -> list[pb.WorkerUpdate]:
        seq = self._journal.last_seq
        pieces: list[tuple[int, bytes]] = [*self._journal.snapshot()]
        updates = []
        for index in range(max(1, len(pieces))):
            snapshot = pb.Snapshot(
                epoch=self._hello.epoch, seq=seq, is_first=index == 0, is_last=index >= len(pieces) - 1
            )
            if pieces:
                group, hashes = pieces[index]
                snapshot.blocks.add(group=group, hashes=hashes)
            updates.append(pb.WorkerUpdate(snapshot=snapshot))
        return updates


class _Stream:
    """How far one directory is."""

    def __init__(self, resolve: Resolve) -> None:
        self.resolve = resolve
        self.changed = asyncio.Event()
        self.next_seq = 1
        self.wants_snapshot = False
        self.has_report = True
        self.is_complete = True
        """Whether the next report says all that is live."""
        self.admitted: deque[str] = deque(maxlen=_MAX_UNTOLD)
        self.finished: deque[str] = deque(maxlen=_MAX_UNTOLD)
        self.is_leaving = False
        self.is_accepted = False
        self.is_ended = False

    def begin(self, ack: pb.DirectoryAck) -> None:
        """A stream was accepted."""
        self.is_accepted = True
        self.is_ended = False
        self.has_report = self.is_complete = True
        self.wants_snapshot = False
        self.next_seq = ack.last_seq + 1

    def take_ack(self, ack: pb.DirectoryAck) -> None:
        """A complaint."""
        if ack.status == pb.DirectoryAck.OUT_OF_RANGE:
            self.next_seq = ack.last_seq + 1
        elif ack.status == pb.DirectoryAck.DATA_LOSS:
            self.wants_snapshot = True
        self.changed.set()

    def load_report(self, report: pb.LoadReport, live: Iterable[str]) -> pb.LoadReport:
        """The next report: `report` with the lists that this directory has not been told."""
        update = pb.LoadReport()
        update.CopyFrom(report)
        update.admitted.extend(live if self.is_complete else self.admitted)
        update.finished.extend(self.finished)
        update.is_complete = self.is_complete
        update.last_seq = self.next_seq - 1
        self.admitted.clear()
        self.finished.clear()
        self.is_complete = False
        return update


async def _read_acks(call: Any, stream: _Stream) -> None:
    try:
        while (ack := await call.read()) is not grpc.aio.EOF:
            stream.take_ack(ack)
    except grpc.aio.AioRpcError as error:
        logger.debug("a directory's stream ended: %s", error.details())
    finally:
        stream.is_ended = True
        stream.changed.set()


def _event(event: KVEvent) -> pb.BlockEvent:
    if isinstance(event, AllBlocksCleared):
        return pb.BlockEvent(cleared=pb.AllBlocksCleared())
    blocks = pb.Blocks(group=event.group, hashes=b"".join(event.hashes))
    return pb.BlockEvent(stored=blocks) if isinstance(event, BlockStored) else pb.BlockEvent(removed=blocks)
