"""Takes what workers say of themselves. No network and no clock: callers say what time it is.

Per worker, the stream of events is one of these:

    exact     --gap-->  degraded  --the missing batches, or a snapshot-->  exact
    exact, degraded  --silent for the lease, goodbye, new epoch-->  forgotten

A degraded worker keeps what was known of it, which may be wrong in part: that costs hits, never a request.
"""

import itertools
from collections import Counter

from pagoda.cluster.directory.checks import (
    MAX_CLEARED,
    MAX_LIVE,
    MAX_NUM_GROUPS,
    MAX_NUM_WORKERS,
    MAX_RATE,
    MAX_WORKER_ENTRIES,
    StaleEpochError,
    check_hashes,
    check_id,
)
from pagoda.cluster.directory.index import Tier
from pagoda.cluster.directory.reservations import Reservations
from pagoda.cluster.directory.worker_record import ModelRecord, WorkerRecord
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.block_hash import HASH_BYTES
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.kv_layout import FINGERPRINT_BYTES

_LONGEST_TICK_S = 1.0
"""Between two ticks; beyond it workers are not to blame for their silence."""
_ASK_AGAIN_S = 1.0
"""After which a gap that nobody has mended is complained of once more, then as a loss."""


class WorkerStreams:
    """All workers of one directory. Not thread-safe."""

    def __init__(self, directory_id: str, reservations: Reservations, *, now_s: float, lease_s: float) -> None:
        """A worker that is silent for `lease_s` is forgotten. `reservations` end with what workers tell."""
        self._directory_id = directory_id
        self._reservations = reservations
        self._lease_s = lease_s
        self._ticked_s = now_s
        self._stream_numbers = itertools.count(1)
        self.models: dict[str, ModelRecord] = {}
        self.by_id: dict[str, WorkerRecord] = {}
        self.live_at: dict[str, str] = {}
        """Admitted request -> worker."""
        self.num_block_events = 0
        self.events: Counter[str] = Counter()
        """What has happened to streams, by kind."""

    def hello(self, hello: pb.Hello, now_s: float) -> tuple[WorkerRecord, int, pb.DirectoryAck]:
        """A stream begins. Returns its worker, its number, and what to answer."""
        _check(hello)
        record = self.by_id.get(hello.worker_id)
        if record is not None and hello.epoch < record.hello.epoch:
            raise StaleEpochError(f"epoch: {hello.epoch} is over, {record.hello.epoch} has begun")
        if record is not None and (hello.epoch > record.hello.epoch or hello.model != record.hello.model):
            self._forget(record)
            record = None
        if record is None:
            if len(self.by_id) >= MAX_NUM_WORKERS:
                raise InvalidRequestError("hello", f"there are {MAX_NUM_WORKERS} workers already")
            if (model := self.models.get(hello.model)) is None:
                model = self.models[hello.model] = ModelRecord(hello, now_s)
            model.check(hello)
            reserved = self._reservations.load_of(hello.worker_id)
            record = WorkerRecord(hello, model.add_slot(), reserved, model.typical, now_s)
            self.by_id[hello.worker_id] = model.workers[hello.worker_id] = record
        else:
            self.models[hello.model].check(hello)
            record.hello = hello
            if record.is_in_snapshot:  # which broke off
                self._empty(record)
                record.is_in_snapshot = False
        record.stream = next(self._stream_numbers)
        record.heard_s = now_s
        record.asked_s = None
        record.known_seq = max(record.known_seq, hello.last_seq)
        return record, record.stream, self._ack(record, pb.DirectoryAck.OK)

    def update(self, record: WorkerRecord, update: pb.WorkerUpdate, now_s: float) -> pb.DirectoryAck | None:
        """Take what a worker says after its hello. Returns what to answer, if anything."""
        record.heard_s = now_s
        match update.WhichOneof("update"):
            case "events":
                return self._take_events(record, update.events, now_s)
            case "snapshot":
                return self._take_snapshot(record, update.snapshot)
            case "load":
                self._take_load(record, update.load)
                record.known_seq = max(record.known_seq, update.load.last_seq)
                if update.load.last_seq > record.last_seq and not record.is_in_snapshot:
                    return self._complain(record, now_s)
            case "goodbye":
                self._forget(record)
            case kind:
                raise InvalidRequestError("update", f"{kind or 'nothing'} has no place here")
        return None

    def is_current(self, record: WorkerRecord, stream: int) -> bool:
        """Whether this stream still speaks for its worker: another one may have begun, or the worker be forgotten."""
        return record.stream == stream and self.by_id.get(record.worker_id) is record

    def _take_events(self, record: WorkerRecord, batch: pb.EventBatch, now_s: float) -> pb.DirectoryAck | None:
        if batch.epoch != record.hello.epoch:
            raise InvalidRequestError("events.epoch", f"is {batch.epoch}, hello said {record.hello.epoch}")
        if batch.seq <= record.last_seq:
            self.events["duplicate"] += 1
            return None
        record.known_seq = max(record.known_seq, batch.seq)
        if batch.seq != record.last_seq + 1 or record.is_in_snapshot:
            return self._complain(record, now_s)
        if sum(event.HasField("cleared") for event in batch.events) > MAX_CLEARED:
            raise InvalidRequestError("events.events", f"more than {MAX_CLEARED} times everything cleared")
        for event in batch.events:
            match event.WhichOneof("kind"):
                case "stored":
                    self._change(record, event.stored, is_stored=True)
                case "removed":
                    self._change(record, event.removed, is_stored=False)
                case "cleared":
                    self._empty(record)
                case _:
                    raise InvalidRequestError("events.events", "an event of no kind")
        record.last_seq = batch.seq
        if record.asked_s is not None and record.is_exact:
            self.events["journal"] += 1
            record.asked_s = None
        return None

    def _complain(self, record: WorkerRecord, now_s: float) -> pb.DirectoryAck | None:
        """Of a gap; once, and when it stays open as of a loss."""
        if record.asked_s is not None and now_s - record.asked_s < _ASK_AGAIN_S:
            return None
        is_first = record.asked_s is None
        record.asked_s = now_s
        self.events["gap"] += 1
        return self._ack(record, pb.DirectoryAck.OUT_OF_RANGE if is_first else pb.DirectoryAck.DATA_LOSS)

    def _take_snapshot(self, record: WorkerRecord, snapshot: pb.Snapshot) -> pb.DirectoryAck | None:
        if snapshot.epoch != record.hello.epoch:
            raise InvalidRequestError("snapshot.epoch", f"is {snapshot.epoch}, hello said {record.hello.epoch}")
        if snapshot.is_first:
            self._empty(record)
            record.is_in_snapshot = True
            record.last_seq = 0  # until it is whole
        elif not record.is_in_snapshot:
            raise InvalidRequestError("snapshot.is_first", "no snapshot has begun")
        for blocks in snapshot.blocks:
            self._change(record, blocks, is_stored=True)
        if snapshot.is_last:
            self.events["snapshot"] += 1
            record.last_seq = snapshot.seq
            record.known_seq = max(record.known_seq, snapshot.seq)
            record.is_in_snapshot = False
            record.asked_s = None
        return None

    def _change(self, record: WorkerRecord, blocks: pb.Blocks, *, is_stored: bool) -> None:
        index = self.models[record.hello.model].index
        packed: bytes = blocks.hashes
        check_hashes(packed)
        if blocks.group >= len(index.windows):
            raise InvalidRequestError("blocks.group", f"is {blocks.group}, there are {len(index.windows)}")
        try:
            tier = Tier(blocks.tier)
        except ValueError:
            raise InvalidRequestError("blocks.tier", f"{blocks.tier} is none") from None
        self.num_block_events += len(packed) // HASH_BYTES
        if not is_stored:
            index.remove(record.slot, tier, blocks.group, packed)
            return
        room = MAX_WORKER_ENTRIES - sum(index.num_held(record.slot))
        if len(packed) > room * HASH_BYTES:
            self.events["over_bound"] += 1
            packed = packed[: max(0, room) * HASH_BYTES]
        index.store(record.slot, tier, blocks.group, packed)

    def _take_load(self, record: WorkerRecord, report: pb.LoadReport) -> None:
        for field, value in report.rates.ListFields():
            if not 0 <= value < MAX_RATE:
                raise InvalidRequestError(f"load.rates.{field.name}", f"must be between 0 and {MAX_RATE:g}, is {value}")
        for request_id in (*report.admitted, *report.finished):
            check_id("load.admitted", request_id)
        if len(record.live) + len(report.admitted) > MAX_LIVE:
            raise InvalidRequestError("load.admitted", f"more than {MAX_LIVE} requests at once")
        if report.is_complete:
            for request_id in record.live:
                if self.live_at.get(request_id) == record.worker_id:
                    del self.live_at[request_id]
            record.live = set()
        for request_id in report.admitted:
            record.live.add(request_id)
            self.live_at[request_id] = record.worker_id
        for request_id in report.finished:
            record.live.discard(request_id)
            if self.live_at.get(request_id) == record.worker_id:
                del self.live_at[request_id]
        self._reservations.end_as_told_by(record.worker_id, report.admitted, "admitted")
        self._reservations.end_as_told_by(record.worker_id, report.finished, "finished")
        record.take_report(report)

    def _empty(self, record: WorkerRecord) -> None:
        """It holds nothing any more."""
        model = self.models[record.hello.model]
        if any(model.index.num_held(record.slot)):
            model.retire_slot(record.slot)
            record.slot = model.add_slot()

    def _forget(self, record: WorkerRecord) -> None:
        model = self.models[record.hello.model]
        model.retire_slot(record.slot)
        for request_id in record.live:
            if self.live_at.get(request_id) == record.worker_id:
                del self.live_at[request_id]
        self._reservations.drop_worker(record.worker_id)
        del self.by_id[record.worker_id], model.workers[record.worker_id]
        if not model.workers:  # whoever comes next may be of another kind
            del self.models[record.hello.model]

    def _ack(self, record: WorkerRecord, status: "pb.DirectoryAck.Status") -> pb.DirectoryAck:
        return pb.DirectoryAck(status=status, last_seq=record.last_seq, directory_id=self._directory_id)

    def tick(self, now_s: float) -> None:
        """Leases end. Call it often: if nobody did, it was us who slept."""
        slept_s = max(0.0, now_s - self._ticked_s - _LONGEST_TICK_S)
        self._ticked_s = now_s
        for record in self.by_id.values():
            record.heard_s = min(now_s, record.heard_s + slept_s)
        for record in list(self.by_id.values()):
            if now_s - record.heard_s > self._lease_s:
                self.events["lease_missed"] += 1
                self._forget(record)

    def sweep(self) -> bool:
        """Do a small piece of cleaning up. False if none is left."""
        return any(model.index.sweep() for model in self.models.values())


def _check(hello: pb.Hello) -> None:
    check_id("hello.worker_id", hello.worker_id)
    check_id("hello.model", hello.model)
    for name in ("epoch", "block_size", "num_blocks", "max_num_seqs"):
        if not getattr(hello, name):
            raise InvalidRequestError(f"hello.{name}", "must be at least 1")
    if len(hello.layout) not in (0, FINGERPRINT_BYTES):
        raise InvalidRequestError("hello.layout", f"must be of {FINGERPRINT_BYTES} bytes, or none")
    if not 1 <= len(hello.windows) <= MAX_NUM_GROUPS:
        raise InvalidRequestError("hello.windows", f"must be of 1 to {MAX_NUM_GROUPS} groups")
