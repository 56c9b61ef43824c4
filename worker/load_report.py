"""What a worker tells a directory of itself after each step. Standard library only.

The engine's thread collects it and hands it on in one piece, so that what it says fits together: the blocks that the
step has announced, the requests that it has begun and ended, and a load that contains exactly those.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagoda.worker.cost_model import StepCostModel, StepShape
from pagoda.worker.engine_load import EngineLoad
from pagoda.worker.kv_events import KVEvent, KVEventLog
from pagoda.worker.prefix_lookup import MissReason
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.types import RequestId

_RATES_PERIOD_S = 0.5
_REPORT_PERIOD_S = 0.2
"""So often it is told what decoding changes: a few blocks more, a little more load. A report costs as much CPU time as
several tokens do, and who needs such a block comes after the request that has made it has ended."""
_AVERAGED_S = 5.0
_WEIGHT = 0.3
"""Of what the last period has shown, in a rate."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """How fast it is done. 0 of what was never seen."""

    prefill_s_per_token: float = 0.0
    prefill_s_per_token_and_context: float = 0.0
    step_base_s: float = 0.0
    step_s_per_sequence: float = 0.0
    released_blocks_per_s: float = 0.0
    evicted_hit_ratio: float = 0.0
    """Of tokens pushed out of the cache, the part that was asked for again soon after. At most 1."""
    mean_output_tokens: float = 0.0
    busy_ratio: float = 0.0
    """The part of the time in which steps are computed."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One report."""

    events: Sequence[KVEvent]
    load: EngineLoad
    rates: MeasuredRates
    admitted: Sequence[RequestId]
    """Requests that have come since the last report; the load contains them."""
    finished: Sequence[RequestId]


@dataclass(slots=True)
class _Counts:
    """Counters as of some time."""

    at_s: float
    num_released: int
    num_evicted: int
    num_evicted_misses: int
    num_finished: int
    num_output_tokens: int


class LoadReporter:
    """The engine's thread tells it what happens; it calls `on_report` on that thread."""

    def __init__(
        self,
        log: KVEventLog,
        on_report: Callable[[LoadReport], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` is the one that the block pool writes."""
        self._log = log
        self._on_report = on_report
        self._clock = clock
        self.costs = StepCostModel()
        """What steps take; others may read it."""
        self._rates = MeasuredRates()
        self._admitted: list[RequestId] = []
        self._finished: list[RequestId] = []
        self._busy_s = 0.0
        """Spent in steps since the rates were last measured."""
        self._reported_s = float("-inf")
        self._last = _Counts(clock(), 0, 0, 0, 0, 0)

    def admitted(self, request_id: RequestId) -> None:
        self._admitted.append(request_id)

    def finished(self, request_id: RequestId) -> None:
        self._finished.append(request_id)

    def step_took(self, shape: StepShape, duration_s: float) -> None:
        self._busy_s += duration_s
        self.costs.observe(shape, duration_s)

    def report(self, scheduler: Scheduler) -> None:
        """A step is over, or there was none to do."""
        now_s = self._clock()
        is_idle = not scheduler.has_work()  # what is said last must be right
        if not (self._admitted or self._finished or is_idle) and now_s - self._reported_s < _REPORT_PERIOD_S:
            return
        self._reported_s = now_s
        events = self._log.take()
        if now_s - self._last.at_s >= _RATES_PERIOD_S:
            self._measure(scheduler, now_s)
        admitted, self._admitted = self._admitted, []
        finished, self._finished = self._finished, []
        self._on_report(LoadReport(events, scheduler.load(), self._rates, admitted, finished))

    def _measure(self, scheduler: Scheduler, now_s: float) -> None:
        pool, stats, last, rates = scheduler.manager.pool, scheduler.stats, self._last, self._rates
        num_groups = scheduler.manager.num_groups
        now = _Counts(
            now_s,
            pool.num_released // num_groups,
            pool.num_evicted * scheduler.manager.block_size // num_groups,
            stats.num_missed_tokens[MissReason.EVICTED],
            stats.num_finished,
            stats.num_output_tokens,
        )
        costs = self.costs.costs()
        self._rates = MeasuredRates(
            prefill_s_per_token=costs.per_prefill_token_s + costs.base_s / scheduler.config.max_num_batched_tokens,
            prefill_s_per_token_and_context=costs.per_pair_s,
            step_base_s=costs.base_s,
            step_s_per_sequence=costs.per_decode_s,
            released_blocks_per_s=_mixed(
                rates.released_blocks_per_s, now.num_released - last.num_released, now.at_s - last.at_s
            ),
            evicted_hit_ratio=min(
                1.0,
                _mixed(
                    rates.evicted_hit_ratio,
                    now.num_evicted_misses - last.num_evicted_misses,
                    now.num_evicted - last.num_evicted,
                ),
            ),
            mean_output_tokens=_mixed(
                rates.mean_output_tokens,
                now.num_output_tokens - last.num_output_tokens,
                now.num_finished - last.num_finished,
            ),
            busy_ratio=min(1.0, _averaged(rates.busy_ratio, self._busy_s, now.at_s - last.at_s)),
        )
        self._busy_s = 0.0
        self._last = now


def _mixed(before: float, amount: float, per: float) -> float:
    """A rate, with what the last period has shown; as it was if that has shown nothing."""
    if per <= 0:
        return before
    return amount / per if before == 0 else (1 - _WEIGHT) * before + _WEIGHT * amount / per


def _averaged(before: float, amount_s: float, period_s: float) -> float:
    """A part of the time, over the last `_AVERAGED_S` or so."""
    kept = math.exp(-period_s / _AVERAGED_S)
    return kept * before + (1 - kept) * amount_s / period_s
