"""How fast an engine is, measured from its steps. Standard library only: times are arguments."""

from pagoda.worker.cost_model import StepCostModel
from pagoda.worker.deadlines import Pace

_PERIOD_S = 0.5
"""So often rates are measured anew: fitting costs takes a tenth of a millisecond."""
_WEIGHT = 0.05
"""Of a step in the mean of steps."""
_RATE_WEIGHT = 0.3
_LONGEST_S = 60.0


class PaceMeter:
    """Made and used on the engine's thread; what it says of the past anybody may read."""

    def __init__(self, costs: StepCostModel, now_s: float) -> None:
        """`costs` is fed by whoever feeds it."""
        self.pace = Pace()
        self._costs = costs
        self._step_s = 0.0
        self._ends_per_s = 0.0
        self._measured_s = now_s
        self._num_finished = 0

    def step_took(self, duration_s: float) -> None:
        """A step that computed something."""
        self._step_s += (duration_s - self._step_s) * (_WEIGHT if self._step_s else 1.0)

    def measure(self, now_s: float, num_finished: int) -> None:
        """From time to time, with how many sequences have ended since the start."""
        elapsed_s = now_s - self._measured_s
        if elapsed_s < _PERIOD_S:
            return
        costs = self._costs.costs()
        self.pace = Pace(costs.per_prefill_token_s, costs.per_pair_s, self._step_s)
        rate = (num_finished - self._num_finished) / elapsed_s
        self._ends_per_s += (rate - self._ends_per_s) * (_RATE_WEIGHT if self._ends_per_s else 1.0)
        self._measured_s, self._num_finished = now_s, num_finished

    def wait_s(self, num_waiting: int) -> float | None:
        """In about so many seconds those who wait now have all begun; None if nothing has ended of late."""
        if self._ends_per_s <= 0:
            return None
        return min(_LONGEST_S, num_waiting / self._ends_per_s)
