"""All that a directory knows and does. No network and no clock: callers say what time it is."""

from collections import Counter
from collections.abc import Callable, Sequence

from pagoda.cluster.directory.checks import (
    MAX_HASHES,
    MAX_NUM_WORKERS,
    MAX_PROMPT_TOKENS,
    MAX_RESERVATION_S,
    MAX_SAMPLES,
    UnknownModelError,
    check_hashes,
    check_id,
)
from pagoda.cluster.directory.index import Tier, slot_bit
from pagoda.cluster.directory.reservations import Reservation, Reservations
from pagoda.cluster.directory.worker_record import ModelRecord, WorkerRecord
from pagoda.cluster.directory.worker_streams import WorkerStreams
from pagoda.cluster.placement import Placement, Prompt, place
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.block_hash import HASH_BYTES
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import quoted

_NOTHING: dict[Tier, int] = {}


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
        self._began_s = now_s
        self._draw = draw
        self._reservation_s = reservation_s
        self._reservations = Reservations()
        self.workers = WorkerStreams(directory_id, self._reservations, now_s=now_s, lease_s=lease_s)
        self._num_truncated = 0
        self._num_placed_tokens = self._num_placed_cached_tokens = 0
        self._placements: Counter[str] = Counter()

    def tick(self, now_s: float) -> None:
        """What time brings: leases and reservations end. Call it often."""
        self.workers.tick(now_s)
        for model in self.workers.models.values():
            model.predicted.generations(now_s)  # so that old ones go, and slots with them, if nobody asks
        self._reservations.expire(now_s)

    def place(self, request: pb.PlaceRequest, now_s: float) -> pb.PlaceResponse:
        """Match, score and reserve."""
        check_id("request_id", request.request_id)
        check_hashes(request.hashes)
        if not 1 <= request.num_tokens <= MAX_PROMPT_TOKENS:
            raise InvalidRequestError("num_tokens", f"must be between 1 and {MAX_PROMPT_TOKENS}")
        if len(request.exclude) > MAX_NUM_WORKERS:
            raise InvalidRequestError("exclude", f"may name {MAX_NUM_WORKERS} workers")
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
        where = self._where(request.request_id)
        pinned = request.placed_on or where
        placement = place(prompt, candidates, self._draw, pinned=pinned)
        assert placement is not None
        self._reserve(model, request, prompt, placement, hashes, now_s)
        reason = "given" if request.placed_on and pinned == placement.ranked[0] else str(placement.reason)
        if where is None:  # who asks again is counted once
            self._count(model.workers[placement.ranked[0]], request.num_tokens, placement.num_cached_tokens, reason)
        return _response(placement, reason)

    def _where(self, request_id: str) -> str | None:
        """Where a request is already, or is to be."""
        if (reservation := self._reservations.get(request_id)) is not None:
            return reservation.worker_id
        return self.workers.live_at.get(request_id)

    def _count(self, record: WorkerRecord, num_tokens: int, num_cached_tokens: int, reason: str) -> None:
        self._placements[reason] += 1
        self._num_placed_tokens += num_tokens
        self._num_placed_cached_tokens += num_cached_tokens
        record.num_placements += 1
        record.num_placed_tokens += num_tokens
        record.num_placed_cached_tokens += num_cached_tokens

    def _reserve(
        self,
        model: ModelRecord,
        request: pb.PlaceRequest,
        prompt: Prompt,
        placement: Placement,
        hashes: Sequence[bytes],
        now_s: float,
    ) -> None:
        worker_id = placement.ranked[0]
        if self.workers.live_at.get(request.request_id) == worker_id:
            return  # the worker's own numbers contain it
        record, num_uncached = model.workers[worker_id], placement.num_uncached_tokens
        lifetime_s = min(request.reservation_ms / 1e3, MAX_RESERVATION_S) or self._reservation_s
        self._reservations.reserve(
            Reservation(
                request.request_id,
                worker_id,
                num_uncached,
                num_uncached * placement.num_cached_tokens + num_uncached**2 // 2,
                prompt.num_samples,
                placement.num_new_blocks,
                now_s + lifetime_s,
                frozenset(request.exclude) & self.workers.by_id.keys(),
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
            workers=[self._worker_stats(record, now_s) for record in self.workers.by_id.values()],
            num_entries=sum(model.index.num_entries for model in self.workers.models.values()),
            placements=self._placements,
            placed_tokens=self._num_placed_tokens,
            placed_cached_tokens=self._num_placed_cached_tokens,
            block_events=self.workers.num_block_events,
            reservations=len(self._reservations),
            reservation_ends=self._reservations.ends,
            truncated_prompts=self._num_truncated,
            stream_events=self.workers.events,
        )

    def _worker_stats(self, record: WorkerRecord, now_s: float) -> pb.WorkerStats:
        hello, report = record.hello, record.report
        return pb.WorkerStats(
            worker_id=hello.worker_id,
            model=hello.model,
            epoch=hello.epoch,
            last_seq=record.last_seq,
            is_exact=record.is_exact,
            num_blocks_held=self.workers.models[hello.model].index.num_held(record.slot),
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
            layout=hello.layout,
            tensor_parallel_size=hello.tensor_parallel_size,
        )

    def _model(self, name: str) -> ModelRecord:
        model = self.workers.models.get(name)
        if model is None:
            raise UnknownModelError(f"no worker serves {quoted(name)}")
        return model

    def _split(self, packed: bytes) -> list[bytes]:
        if len(packed) > MAX_HASHES * HASH_BYTES:
            self._num_truncated += 1
            packed = packed[: MAX_HASHES * HASH_BYTES]
        return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


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
