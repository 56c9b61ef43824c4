"""What a directory keeps of each worker, and of all workers of a model."""

import logging
from dataclasses import replace

from pagoda.cluster.directory.checks import MismatchError
from pagoda.cluster.directory.index import PrefixIndex
from pagoda.cluster.directory.predicted import PredictedBlocks
from pagoda.cluster.directory.reservations import ReservedLoad
from pagoda.cluster.placement import Candidate, WorkerLoad, WorkerRates
from pagoda.proto import directory_pb2 as pb

_PREDICTED_LIFETIME_S = 3.0

logger = logging.getLogger(__name__)


class WorkerRecord:
    """One worker, as it has described itself."""

    def __init__(
        self, hello: pb.Hello, slot: int, reserved: ReservedLoad, typical: "TypicalRates", now_s: float
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
                step_base_s=rates.step_base_s,
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
                num_uncached_pairs=report.num_uncached_pairs + reserved.num_uncached_pairs,
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


class TypicalRates:
    """What workers of a model have lately measured: for those that have not yet, which would else seem free."""

    def __init__(self) -> None:
        self.rates = WorkerRates()
        self.num_changes = 0

    def take(self, measured: WorkerRates) -> None:
        self.rates = measured
        self.num_changes += 1


class ModelRecord:
    """The workers of one model and what they hold."""

    def __init__(self, hello: pb.Hello, now_s: float) -> None:
        self.block_size = hello.block_size
        self.index = PrefixIndex(hello.windows)
        self.predicted = PredictedBlocks(_PREDICTED_LIFETIME_S, now_s=now_s)
        self.typical = TypicalRates()
        self.workers: dict[str, WorkerRecord] = {}

    def add_slot(self) -> int:
        return self.index.add_slot(avoid=self.predicted.retired_slots)

    def retire_slot(self, slot: int) -> None:
        self.predicted.retire(slot)
        self.index.retire_slot(slot)

    def check(self, hello: pb.Hello) -> None:
        """Raise `MismatchError` if this worker's blocks are of another kind. One with other values is mentioned."""
        fingerprints = {record.hello.fingerprint for record in self.workers.values()}
        if fingerprints and hello.fingerprint not in fingerprints:
            logger.warning(
                "%s: its blocks hold other values than those of any other worker of %s; none finds another's prefixes",
                hello.worker_id,
                hello.model,
            )
        for name, theirs, ours in (
            ("block_size", hello.block_size, self.block_size),
            ("windows", tuple(hello.windows), self.index.windows),
        ):
            if theirs != ours:
                raise MismatchError(f"{name}: is {theirs}, that of other workers of {hello.model!r} is {ours}")
