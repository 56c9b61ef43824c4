"""All that a directory knows and does. No network and no clock: callers say what time it is.

Per worker, the stream of events is one of these:

    exact     --gap-->  degraded  --the missing batches, or a snapshot-->  exact
    exact, degraded  --silent for the lease, goodbye, new epoch-->  forgotten

A degraded worker keeps what was known of it, which may be wrong in part: that costs hits, never a request.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagoda.cluster.directory.index import PrefixIndex, Tier, slot_bit
from pagoda.cluster.directory.predicted import PredictedBlocks
from pagoda.cluster.directory.reservations import Reservation, Reservations, ReservedLoad
from pagoda.cluster.placement import Candidate, Placement, Prompt, WorkerLoad, WorkerRates, place
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.block_hash import HASH_BYTES
from pagoda.worker.errors import InvalidRequestError, PagodaError

MAX_HASHES = 4096
"""Of a prompt that are looked at."""
MAX_ID_BYTES = 256
MAX_NUM_WORKERS = 4096
MAX_NUM_GROUPS = 64
MAX_RESERVATION_S = 600.0
MAX_SAMPLES = 4096
MAX_LIVE = 100_000
"""Requests of one worker."""
MAX_CLEARED = 64
"""Of one batch."""
MAX_RATE = 1e9
MAX_WORKER_ENTRIES = 8 * 2**20
"""Blocks of one worker over all tiers and groups; what is beyond is left out, and counted."""
_PREDICTED_LIFETIME_S = 3.0
_NOTHING: dict[Tier, int] = {}
_LONGEST_TICK_S = 1.0
"""Between two ticks; beyond it workers are not to blame for their silence."""
_ASK_AGAIN_S = 1.0
"""After which a gap that nobody has mended is complained of once more, then as a loss."""


class UnknownModelError(PagodaError):
    """No worker serves the model."""


class StaleEpochError(PagodaError):
    """A worker that started anew since then has spoken already."""


class MismatchError(PagodaError):
    """A worker whose blocks cannot be compared with those of the others of its model."""


class WorkerRecord:
    """One worker, as it has described itself."""

    def __init__(
        self, hello: pb.Hello, slot: int, reserved: ReservedLoad, typical: "_TypicalRates", now_s: float
    ) -> None:
        self.hello = hello
        self._typical = typical
        self.slot = slot
        self.stream = 0
        """Number of the stream that speaks for it; others are outdated."""
        self.last_seq = 0
        self.known_seq = hello.last_seq
        """The last batch that is known to have been made."""
        self.asked_s: float | None = None
        """When it was told of a gap that is still open."""
        self.is_in_snapshot = False
        self.heard_s = now_s
        self.report = pb.LoadReport(num_free_blocks=hello.num_blocks, num_empty_blocks=hello.num_blocks)
        self._rates: WorkerRates | None = None
        """None until it has measured something."""
        self.live: set[str] = set()
        """Requests that it has admitted and not ended."""
        self.num_placements = self.num_placed_tokens = self.num_placed_cached_tokens = 0
        self._reserved = reserved
        self._candidate: Candidate | None = None
        self._num_changes = (-1, -1)

    @property
    def is_exact(self) -> bool:
        """Whether what is known of it is all that it has said."""
        return not self.is_in_snapshot and self.last_seq >= self.known_seq

    @property
    def worker_id(self) -> str:
        return str(self.hello.worker_id)

    @property
    def reserved(self) -> ReservedLoad:
        return self._reserved

    def take_report(self, report: pb.LoadReport) -> None:
        self.report = report
        rates = report.rates
        if rates.prefill_s_per_token > 0:
            measured = WorkerRates(
                prefill_s_per_token=rates.prefill_s_per_token,
                prefill_s_per_token_and_context=rates.prefill_s_per_token_and_context,
                step_s_per_sequence=rates.step_s_per_sequence,
                released_blocks_per_s=rates.released_blocks_per_s,
                restore_s_per_token=rates.restore_s_per_token,
                evicted_hit_ratio=rates.evicted_hit_ratio,
                mean_output_tokens=rates.mean_output_tokens,
                busy_ratio=rates.busy_ratio,
            )
            if measured != self._rates:
                self._rates = measured
                self._typical.take(measured)
        self._candidate = None

    def candidate(self) -> Candidate:
        """For a prompt of which it holds nothing: as it reports, and with what is reserved there."""
        reserved, report = self._reserved, self.report
        num_changes = reserved.num_changes, -1 if self._rates is not None else self._typical.num_changes
        if self._candidate is None or self._num_changes != num_changes:
            self._num_changes = num_changes
            load = WorkerLoad(
                num_uncached_tokens=report.num_uncached_tokens + reserved.num_uncached_tokens,
                num_sequences=report.num_running + report.num_waiting + reserved.num_sequences,
                max_num_seqs=self.hello.max_num_seqs,
                num_free_blocks=report.num_free_blocks - reserved.num_blocks,
                num_empty_blocks=max(0, report.num_empty_blocks - reserved.num_blocks),
                num_blocks=self.hello.num_blocks,
            )
            # How busy others are says nothing of this one.
            rates = self._rates or replace(self._typical.rates, busy_ratio=report.rates.busy_ratio)
            self._candidate = Candidate(self.worker_id, load, rates)
        return self._candidate


class _TypicalRates:
    """What workers of a model have lately measured: for those that have not yet, which would else seem free."""

    def __init__(self) -> None:
        self.rates = WorkerRates()
        self.num_changes = 0

    def take(self, measured: WorkerRates) -> None:
        self.rates = measured
        self.num_changes += 1


class _Model:
    """The workers of one model and what they hold."""

    def __init__(self, hello: pb.Hello, now_s: float) -> None:
        self.block_size = hello.block_size
        self.index = PrefixIndex(hello.windows)
        self.predicted = PredictedBlocks(_PREDICTED_LIFETIME_S, now_s=now_s)
        self.typical = _TypicalRates()
        self.workers: dict[str, WorkerRecord] = {}

    def add_slot(self) -> int:
        return self.index.add_slot(avoid=self.predicted.retired_slots)

    def retire_slot(self, slot: int) -> None:
        self.predicted.retire(slot)
        self.index.retire_slot(slot)

    def check(self, hello: pb.Hello) -> None:
        """Raise `MismatchError` if this worker's blocks are of another kind."""
        for name, theirs, ours in (
            ("block_size", hello.block_size, self.block_size),
            ("windows", tuple(hello.windows), self.index.windows),
        ):
            if theirs != ours:
                raise MismatchError(f"{name}: is {theirs}, that of other workers of {hello.model!r} is {ours}")


class DirectoryState:
    """One directory. Not thread-safe."""

    def __init__(
        self,
        directory_id: str,
        *,
        now_s: float,
        draw: Callable[[], float],
        lease_s: float = 3.0,
        reservation_s: float = 30.0,
    ) -> None:
        """A worker that is silent for `lease_s` is forgotten; `draw` gives numbers in [0, 1), for ties."""
        self.directory_id = directory_id
        self._began_s = self._ticked_s = now_s
        self._draw = draw
        self._lease_s = lease_s
        self._reservation_s = reservation_s
        self._models: dict[str, _Model] = {}
        self._workers: dict[str, WorkerRecord] = {}
        self._live_at: dict[str, str] = {}
        """Admitted request -> worker."""
        self._reservations = Reservations()
        self._stream_numbers = itertools.count(1)
        self._num_events = self._num_truncated = 0
        self._num_placed_tokens = self._num_placed_cached_tokens = 0
        self._placements: Counter[str] = Counter()
        self._stream_events: Counter[str] = Counter()

    # -- workers ---------------------------------------------------------------------------------

    def hello(self, hello: pb.Hello, now_s: float) -> tuple[WorkerRecord, int, pb.DirectoryAck]:
        """A stream begins. Returns its worker, its number, and what to answer."""
        _check_hello(hello)
        record = self._workers.get(hello.worker_id)
        if record is not None and hello.epoch < record.hello.epoch:
            raise StaleEpochError(f"epoch: {hello.epoch} is over, {record.hello.epoch} has begun")
        if record is not None and (hello.epoch > record.hello.epoch or hello.model != record.hello.model):
            self._forget(record)
            record = None
        if record is None:
            if len(self._workers) >= MAX_NUM_WORKERS:
                raise InvalidRequestError("hello", f"there are {MAX_NUM_WORKERS} workers already")
            if (model := self._models.get(hello.model)) is None:
                model = self._models[hello.model] = _Model(hello, now_s)
            model.check(hello)
            reserved = self._reservations.load_of(hello.worker_id)
            record = WorkerRecord(hello, model.add_slot(), reserved, model.typical, now_s)
            self._workers[hello.worker_id] = model.workers[hello.worker_id] = record
        else:
            self._models[hello.model].check(hello)
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
        return record.stream == stream and self._workers.get(record.worker_id) is record

    def _take_events(self, record: WorkerRecord, batch: pb.EventBatch, now_s: float) -> pb.DirectoryAck | None:
        if batch.epoch != record.hello.epoch:
            raise InvalidRequestError("events.epoch", f"is {batch.epoch}, hello said {record.hello.epoch}")
        if batch.seq <= record.last_seq:
            self._stream_events["duplicate"] += 1
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
            self._stream_events["journal"] += 1
            record.asked_s = None
        return None

    def _complain(self, record: WorkerRecord, now_s: float) -> pb.DirectoryAck | None:
        """Of a gap; once, and when it stays open as of a loss."""
        if record.asked_s is not None and now_s - record.asked_s < _ASK_AGAIN_S:
            return None
        is_first = record.asked_s is None
        record.asked_s = now_s
        self._stream_events["gap"] += 1
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
            self._stream_events["snapshot"] += 1
            record.last_seq = snapshot.seq
            record.known_seq = max(record.known_seq, snapshot.seq)
            record.is_in_snapshot = False
            record.asked_s = None
        return None

    def _change(self, record: WorkerRecord, blocks: pb.Blocks, *, is_stored: bool) -> None:
        index = self._models[record.hello.model].index
        packed: bytes = blocks.hashes
        check_hashes(packed)
        if blocks.group >= len(index.windows):
            raise InvalidRequestError("blocks.group", f"is {blocks.group}, there are {len(index.windows)}")
        try:
            tier = Tier(blocks.tier)
        except ValueError:
            raise InvalidRequestError("blocks.tier", f"{blocks.tier} is none") from None
        self._num_events += len(packed) // HASH_BYTES
        if not is_stored:
            index.remove(record.slot, tier, blocks.group, packed)
            return
        room = MAX_WORKER_ENTRIES - sum(index.num_held(record.slot))
        if len(packed) > room * HASH_BYTES:
            self._stream_events["over_bound"] += 1
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
                if self._live_at.get(request_id) == record.worker_id:
                    del self._live_at[request_id]
            record.live = set()
        for request_id in report.admitted:
            record.live.add(request_id)
            self._live_at[request_id] = record.worker_id
        for request_id in report.finished:
            record.live.discard(request_id)
            if self._live_at.get(request_id) == record.worker_id:
                del self._live_at[request_id]
        self._reservations.end_as_told_by(record.worker_id, report.admitted, "admitted")
        self._reservations.end_as_told_by(record.worker_id, report.finished, "finished")
        record.take_report(report)

    def _empty(self, record: WorkerRecord) -> None:
        """It holds nothing any more."""
        model = self._models[record.hello.model]
        if any(model.index.num_held(record.slot)):
            model.retire_slot(record.slot)
            record.slot = model.add_slot()

    def _forget(self, record: WorkerRecord) -> None:
        model = self._models[record.hello.model]
        model.retire_slot(record.slot)
        for request_id in record.live:
            if self._live_at.get(request_id) == record.worker_id:
                del self._live_at[request_id]
        self._reservations.drop_worker(record.worker_id)
        del self._workers[record.worker_id], model.workers[record.worker_id]
        if not model.workers:  # whoever comes next may be of another kind
            del self._models[record.hello.model]

    def _ack(self, record: WorkerRecord, status: "pb.DirectoryAck.Status") -> pb.DirectoryAck:
        return pb.DirectoryAck(status=status, last_seq=record.last_seq, directory_id=self.directory_id)

    def tick(self, now_s: float) -> None:
        """What time brings: leases and reservations end. Call it often: if nobody did, it was us who slept."""
        slept_s = max(0.0, now_s - self._ticked_s - _LONGEST_TICK_S)
        self._ticked_s = now_s
        for record in self._workers.values():
            record.heard_s = min(now_s, record.heard_s + slept_s)
        for record in list(self._workers.values()):
            if now_s - record.heard_s > self._lease_s:
                self._stream_events["lease_missed"] += 1
                self._forget(record)
        self._reservations.expire(now_s)

    def sweep(self) -> bool:
        """Do a small piece of cleaning up. False if none is left."""
        return any(model.index.sweep() for model in self._models.values())

    # -- requests --------------------------------------------------------------------------------

    def place(self, request: pb.PlaceRequest, now_s: float) -> pb.PlaceResponse:
        """Match, score and reserve."""
        check_id("request_id", request.request_id)
        check_hashes(request.hashes)
        if not request.num_tokens:
            raise InvalidRequestError("num_tokens", "must be at least 1")
        model = self._model(request.model)
        excluded = set(request.exclude)
        records = [record for name, record in model.workers.items() if name not in excluded]
        if not records:
            raise UnknownModelError(f"every worker of {request.model!r} is excluded")
        hashes = self._split(request.hashes[: request.num_tokens // model.block_size * HASH_BYTES])
        match = model.index.match(
            hashes, sum(slot_bit(record.slot) for record in records), model.predicted.generations(now_s)
        )
        candidates = [
            record.candidate().holding(num_blocks, sum(match.num_lower.get(record.slot, _NOTHING).values()))
            if (num_blocks := match.num_blocks.get(record.slot, 0))
            else record.candidate()
            for record in records
        ]
        prompt = Prompt(
            num_tokens=request.num_tokens,
            block_size=model.block_size,
            num_samples=min(request.num_samples, MAX_SAMPLES) or 1,
            max_output_tokens=request.max_output_tokens or None,
        )
        pinned = self._pinned(request)
        placement = place(prompt, candidates, self._draw, pinned=pinned)
        assert placement is not None
        self._reserve(model, request, prompt, placement, hashes, now_s)
        if pinned is None:
            self._num_placed_tokens += request.num_tokens
            self._num_placed_cached_tokens += placement.num_cached_tokens
        reason = "given" if request.placed_on and pinned == placement.ranked[0] else str(placement.reason)
        self._placements[reason] += 1
        return _response(placement, reason)

    def _pinned(self, request: pb.PlaceRequest) -> str | None:
        """Where it is already, or is to be."""
        if request.placed_on:
            return str(request.placed_on)
        if (reservation := self._reservations.get(request.request_id)) is not None:
            return reservation.worker_id
        return self._live_at.get(request.request_id)

    def _reserve(
        self,
        model: _Model,
        request: pb.PlaceRequest,
        prompt: Prompt,
        placement: Placement,
        hashes: Sequence[bytes],
        now_s: float,
    ) -> None:
        worker_id = placement.ranked[0]
        if self._live_at.get(request.request_id) == worker_id:
            return  # the worker's own numbers contain it
        record = model.workers[worker_id]
        record.num_placements += 1
        record.num_placed_tokens += prompt.num_tokens
        record.num_placed_cached_tokens += placement.num_cached_tokens
        lifetime_s = min(request.reservation_ms / 1e3, MAX_RESERVATION_S) or self._reservation_s
        self._reservations.reserve(
            Reservation(
                request.request_id,
                worker_id,
                placement.num_uncached_tokens,
                prompt.num_samples,
                placement.num_new_blocks,
                now_s + lifetime_s,
                frozenset(request.exclude),
            )
        )
        num_held = placement.num_cached_tokens // model.block_size
        model.predicted.add(record.slot, hashes[num_held:])

    def release(self, request: pb.ReleaseRequest) -> None:
        self._reservations.end(request.request_ids, "released")

    def lookup(self, request: pb.LookupRequest, now_s: float) -> pb.LookupResponse:
        check_hashes(request.hashes)
        model = self._model(request.model)
        hashes = self._split(request.hashes)
        everybody = sum(slot_bit(record.slot) for record in model.workers.values())
        held = model.index.match(hashes, everybody)
        believed = model.index.match(hashes, everybody, model.predicted.generations(now_s))
        return pb.LookupResponse(
            workers=[
                pb.HeldPrefix(
                    worker_id=record.worker_id,
                    num_blocks=(num := held.num_blocks.get(record.slot, 0)),
                    num_device_blocks=num - sum(held.num_lower.get(record.slot, {}).values()),
                    num_predicted_blocks=believed.num_blocks.get(record.slot, 0) - num,
                )
                for record in model.workers.values()
            ]
        )

    def stats(self, now_s: float) -> pb.DirectoryStats:
        return pb.DirectoryStats(
            directory_id=self.directory_id,
            uptime_s=now_s - self._began_s,
            workers=[self._worker_stats(record, now_s) for record in self._workers.values()],
            num_entries=sum(model.index.num_entries for model in self._models.values()),
            placements=self._placements,
            placed_tokens=self._num_placed_tokens,
            placed_cached_tokens=self._num_placed_cached_tokens,
            block_events=self._num_events,
            reservations=len(self._reservations),
            reservation_ends=self._reservations.ends,
            truncated_prompts=self._num_truncated,
            stream_events=self._stream_events,
        )

    def _worker_stats(self, record: WorkerRecord, now_s: float) -> pb.WorkerStats:
        hello, report = record.hello, record.report
        return pb.WorkerStats(
            worker_id=hello.worker_id,
            model=hello.model,
            epoch=hello.epoch,
            last_seq=record.last_seq,
            is_exact=record.is_exact,
            num_blocks_held=self._models[hello.model].index.num_held(record.slot),
            num_blocks=hello.num_blocks,
            num_free_blocks=report.num_free_blocks,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            max_num_seqs=hello.max_num_seqs,
            num_uncached_tokens=report.num_uncached_tokens,
            reserved_tokens=record.reserved.num_uncached_tokens,
            reserved_sequences=record.reserved.num_sequences,
            rates=report.rates,
            silent_s=now_s - record.heard_s,
            placements=record.num_placements,
            placed_tokens=record.num_placed_tokens,
            placed_cached_tokens=record.num_placed_cached_tokens,
        )

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            raise UnknownModelError(f"no worker serves {name!r}")
        return model

    def _split(self, packed: bytes) -> list[bytes]:
        if len(packed) > MAX_HASHES * HASH_BYTES:
            self._num_truncated += 1
            packed = packed[: MAX_HASHES * HASH_BYTES]
        return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


def check_hashes(packed: bytes) -> None:
    if len(packed) % HASH_BYTES:
        raise InvalidRequestError("hashes", f"must be a multiple of {HASH_BYTES} bytes long, is {len(packed)}")


def check_id(name: str, value: str) -> None:
    if not 1 <= len(value.encode()) <= MAX_ID_BYTES:
        raise InvalidRequestError(name, f"must have 1 to {MAX_ID_BYTES} bytes")


def _check_hello(hello: pb.Hello) -> None:
    check_id("hello.worker_id", hello.worker_id)
    check_id("hello.model", hello.model)
    for name in ("epoch", "block_size", "num_blocks", "max_num_seqs"):
        if not getattr(hello, name):
            raise InvalidRequestError(f"hello.{name}", "must be at least 1")
    if not 1 <= len(hello.windows) <= MAX_NUM_GROUPS:
        raise InvalidRequestError("hello.windows", f"must be of 1 to {MAX_NUM_GROUPS} groups")


def _response(placement: Placement, reason: str) -> pb.PlaceResponse:
    cost = placement.cost
    return pb.PlaceResponse(
        ranked=placement.ranked,
        reason=reason,
        plan=pb.Plan(
            cached_tokens=placement.num_cached_tokens,
            lower_tokens=placement.num_lower_tokens,
            uncached_tokens=placement.num_uncached_tokens,
            queue_s=cost.queue_s,
            restore_s=cost.restore_s,
            prefill_s=cost.prefill_s,
            block_wait_s=cost.block_wait_s,
            decode_penalty_s=cost.decode_penalty_s,
            eviction_s=cost.eviction_s,
            crowding_s=cost.crowding_s,
        ),
    )
