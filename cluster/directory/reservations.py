"""Load that was promised to workers and is not in their own reports yet. Standard library only.

A reservation begins when a request is placed and ends in exactly one way: its worker reports that it was admitted,
from when on the worker's own numbers contain it; or it ended; or the ingress gave it up; or nothing was heard of it
until its deadline. Whichever comes first; what comes later is ignored.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request that is on its way to a worker."""

    request_id: str
    worker_id: str
    num_uncached_tokens: int
    """Prompt tokens to be computed, of all samples together."""
    num_uncached_pairs: int
    """Of these and the tokens that each of them attends to."""
    num_sequences: int
    num_blocks: int
    """That it will need beside those it shares."""
    deadline_s: float
    not_at: frozenset[str] = frozenset()
    """Workers that have lost or refused it: what they still say of it is old."""


@dataclass(slots=True)
class ReservedLoad:
    """The sum of one worker's reservations."""

    num_uncached_tokens: int = 0
    num_uncached_pairs: int = 0
    num_sequences: int = 0
    num_blocks: int = 0
    num_changes: int = 0
    """So that who has computed something from it sees whether it still holds."""

    def count(self, reservation: Reservation, sign: int) -> None:
        self.num_uncached_tokens += sign * reservation.num_uncached_tokens
        self.num_uncached_pairs += sign * reservation.num_uncached_pairs
        self.num_sequences += sign * reservation.num_sequences
        self.num_blocks += sign * reservation.num_blocks
        self.num_changes += 1


class Reservations:
    """All of them, by request."""

    def __init__(self) -> None:
        self._by_request: dict[str, Reservation] = {}
        self._load: dict[str, ReservedLoad] = {}
        self.ends: Counter[str] = Counter()
        """By how: admitted, finished, released, expired, worker_lost."""

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Reservation | None:
        return self._by_request.get(request_id)

    def load_of(self, worker_id: str) -> ReservedLoad:
        """What is reserved at a worker: always the same object until the worker is dropped; not to be changed."""
        return self._load.setdefault(worker_id, ReservedLoad())

    def reserve(self, reservation: Reservation) -> None:
        """A request has one reservation: an earlier one is replaced."""
        self._drop(reservation.request_id)
        self._by_request[reservation.request_id] = reservation
        self.load_of(reservation.worker_id).count(reservation, 1)

    def end_as_told_by(self, worker_id: str, request_ids: Iterable[str], how: str) -> None:
        """As `end`, but for requests that are not at this worker any more."""
        told = (name for name in request_ids if (r := self._by_request.get(name)) and worker_id not in r.not_at)
        self.end(list(told), how)

    def end(self, request_ids: Iterable[str], how: str) -> None:
        """Ids without a reservation are ignored: signals may come late or twice."""
        if num_ended := sum(self._drop(request_id) for request_id in request_ids):
            self.ends[how] += num_ended

    def expire(self, now_s: float) -> int:
        """End those whose time is over. Returns how many."""
        late = [name for name, reservation in self._by_request.items() if reservation.deadline_s <= now_s]
        self.end(late, "expired")
        return len(late)

    def drop_worker(self, worker_id: str) -> None:
        """It is gone, and what was reserved there with it."""
        self.end([r.request_id for r in self._by_request.values() if r.worker_id == worker_id], "worker_lost")
        self._load.pop(worker_id, None)

    def _drop(self, request_id: str) -> bool:
        reservation = self._by_request.pop(request_id, None)
        if reservation is None:
            return False
        self._load[reservation.worker_id].count(reservation, -1)
        return True
