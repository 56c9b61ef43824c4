"""Until when requests may take, and from when on it is no use to begin with them. Standard library only: no clock.

A request that runs ends at its deadline. One that nothing has been done for yet ends sooner: as soon as what is left is
less than it needs, so that nothing is computed for an answer that comes too late.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

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


class Deadlines:
    """Each request once, by the time at which to look at it again. One owner."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float, list[Sequence]]] = []
        """(when to look, arrival, deadline, samples)."""
        self._num_live = 0
        """As of the last sweep."""

    def add(self, samples: list[Sequence], deadline_s: float, *, look_s: float) -> None:
        """Look at a request at `look_s` or soon after."""
        if len(self._heap) > _MAX_ENDED and len(self._heap) > 2 * self._num_live:
            self._heap = [entry for entry in self._heap if not _have_ended(entry[3])]
            heapify(self._heap)
            self._num_live = len(self._heap)
        heappush(self._heap, (look_s, samples[0].arrival, deadline_s, samples))

    def due(self, now_s: float) -> list[tuple[float, list[Sequence]]]:
        """Deadlines and samples of requests that are to be looked at now; they are forgotten, and added again."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, deadline_s, samples = heappop(self._heap)
            if not _have_ended(samples):
                due.append((deadline_s, samples))
        return due

    def __len__(self) -> int:
        return len(self._heap)


def _have_ended(samples: list[Sequence]) -> bool:
    return all(sample.state is SequenceState.FINISHED for sample in samples)
