"""Until when requests may take, and from when on it is no use to begin with them. Standard library only: no clock.

A request that runs ends at its deadline. One that nothing has been done for yet ends sooner: as soon as what is left is
less than it needs, so that nothing is computed for an answer that comes too late. It may also have a time by which its
first token is due.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from pagoda.worker.sequence import Sequence, SequenceState

_MAX_ENDED = 64


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an engine is, seconds; 0 of what was never seen."""

    per_prefill_token_s: float = 0.0
    per_pair_s: float = 0.0
    """Of a prompt's token and one before it."""
    step_s: float = 0.0
    """A step takes so long, of late."""

    def needed_s(self, num_tokens: int, num_cached_tokens: int, num_output_tokens: float) -> float:
        """From the start of a prompt of which so much is cached to the last one of so many tokens."""
        num_new = num_tokens - num_cached_tokens
        num_pairs = num_new * (num_cached_tokens + num_new / 2)
        prefill_s = num_new * self.per_prefill_token_s + num_pairs * self.per_pair_s
        return prefill_s + num_output_tokens * self.step_s


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """When a request must have come how far, on one clock, seconds."""

    begin_s: float = -inf
    """When its time began."""
    end_by_s: float = inf
    first_token_by_s: float = inf
    """Counts only while nothing has been done for it."""

    def latest_start_s(self, pace: Pace, *, num_tokens: int, num_cached_tokens: int, num_output_tokens: float) -> float:
        """When a prompt must be begun with, of which so much is cached, that is followed by so many tokens.

        So many may never have been possible: then its client takes what it gets, and must at least get a first token.
        """
        to_first_s = pace.needed_s(num_tokens, num_cached_tokens, 1)
        to_end_s = pace.needed_s(num_tokens, num_cached_tokens, num_output_tokens)
        if self.begin_s + to_end_s > self.end_by_s:
            to_end_s = to_first_s
        return min(self.first_token_by_s - to_first_s, self.end_by_s - to_end_s)


class Deadlines:
    """Each request once, by the time at which to look at it again. One owner."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TimeLimits, list[Sequence]]] = []
        """(when to look, arrival, limits, samples)."""
        self._num_live = 0
        """As of the last sweep."""

    def add(self, samples: list[Sequence], limits: TimeLimits, *, look_s: float) -> None:
        """Look at a request at `look_s` or soon after; never if that is infinite."""
        if look_s == inf:
            return
        if len(self._heap) > _MAX_ENDED and len(self._heap) > 2 * self._num_live:
            self._heap = [entry for entry in self._heap if not _have_ended(entry[3])]
            heapify(self._heap)
            self._num_live = len(self._heap)
        heappush(self._heap, (look_s, samples[0].arrival, limits, samples))

    def due(self, now_s: float) -> list[tuple[TimeLimits, list[Sequence]]]:
        """Limits and samples of requests that are to be looked at now; they are forgotten, and added again."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, limits, samples = heappop(self._heap)
            if not _have_ended(samples):
                due.append((limits, samples))
        return due

    def __len__(self) -> int:
        return len(self._heap)


def _have_ended(samples: list[Sequence]) -> bool:
    return all(sample.state is SequenceState.FINISHED for sample in samples)
