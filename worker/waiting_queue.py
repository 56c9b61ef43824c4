"""Sequences that wait for their turn, by who goes first.

A heap: whoever ends while it waits stays inside, counts no more, and is dropped when it comes to the front, or when
more such ones have gathered than live ones.
"""

from heapq import heapify, heappop, heappush

from pagoda.worker.errors import IntegrityError
from pagoda.worker.sequence import Sequence, SequenceState

_MAX_ENDED = 64
"""Beside as many as there are live ones: a short queue is not worth sweeping."""


class WaitingQueue:
    """Not thread-safe: the scheduler owns it."""

    def __init__(self) -> None:
        self.num_sequences = 0
        """Those that wait."""
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._passed: list[tuple[tuple[int, int, int], Sequence]] = []

    @property
    def num_passed(self) -> int:
        """Those that were passed over since the last `restore`; they are among `num_sequences`."""
        return len(self._passed)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence whose state is WAITING."""
        heappush(self._heap, (sequence.order, sequence))
        self.num_sequences += 1
        if len(self._heap) > 2 * self.num_sequences + _MAX_ENDED:
            self._heap = self._live_entries()
            heapify(self._heap)

    def peek(self) -> Sequence | None:
        """The sequence that goes first; it stays."""
        while self._heap and self._heap[0][1].state is not SequenceState.WAITING:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` has just returned."""
        self.num_sequences -= 1
        return heappop(self._heap)[1]

    def pass_over(self) -> None:
        """Let those behind the sequence that `peek` has just returned go first, until `restore`."""
        self._passed.append(heappop(self._heap))

    def restore(self) -> None:
        """Put those that were passed over back into their places."""
        for entry in self._passed:
            heappush(self._heap, entry)
        self._passed.clear()

    def discard(self, sequence: Sequence) -> None:
        """Count one out that waits here and ends now: its state is not WAITING when the queue is next asked."""
        assert sequence.state is SequenceState.WAITING
        self.num_sequences -= 1

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the count is that of the sequences that wait."""
        if len(self._live_entries()) + self.num_passed != self.num_sequences:
            raise IntegrityError("a sequence waits uncounted, or is counted and does not wait")

    def _live_entries(self) -> list[tuple[tuple[int, int, int], Sequence]]:
        return [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
