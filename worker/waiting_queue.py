"""Sequences that wait for their turn, by who goes first: priority, then their tenants' turns, then arrival.

Also keeps the books of who runs, since whose turn it is follows from what each tenant was given.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from pagoda.worker.errors import IntegrityError
from pagoda.worker.fair_turns import Account, FairTurns
from pagoda.worker.sequence import Sequence, SequenceState


class WaitingQueue:
    """Not thread-safe: the scheduler owns it."""

    def __init__(self) -> None:
        self.num_sequences = 0
        """Those that wait."""
        self._classes: dict[int, FairTurns] = {}
        """By priority: those in which somebody waits or runs."""
        self._priorities: list[int] = []
        """A heap of those in which somebody waits, and perhaps of others; each once."""
        self._listed: set[int] = set()
        """What is in it."""
        self._passed: list[Sequence] = []
        self._claim: tuple[int, Account] | None = None
        """Room was made for this tenant, in this priority."""

    @property
    def num_passed(self) -> int:
        """Those that were passed over since the last `restore`; they are among `num_sequences`."""
        return len(self._passed)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence whose state is WAITING."""
        self._push(sequence)
        self.num_sequences += 1

    def peek(self) -> Sequence | None:
        """The sequence that goes first; it stays."""
        place = self._first()
        return None if place is None else place[1].head()

    def pop(self, cost: float) -> Sequence:
        """Take out the sequence that `peek` has just returned: it starts, and will cost about `cost` tokens.

        From now on its `order` says who goes before whom.
        """
        place = self._first()
        assert place is not None
        priority, account = place
        sequence = self._classes[priority].take(account, cost, is_out_of_turn=place == self._claim)
        if place == self._claim:
            self._claim = None
        self.num_sequences -= 1
        return sequence

    def settle(self, sequence: Sequence, cost: float) -> None:
        """One that was popped runs no more, and has cost `cost` tokens: 0 if it will do everything again."""
        self._classes[sequence.request.priority].settle(sequence, cost)
        self._drop_if_empty(sequence.request.priority)

    def pass_over(self) -> None:
        """Let those behind the sequence that `peek` has just returned go first, until `restore`."""
        place = self._first()
        assert place is not None
        priority, account = place
        self._passed.append(self._classes[priority].remove_head(account))

    def restore(self) -> None:
        """Put those that were passed over back into their places."""
        for sequence in self._passed:
            self._push(sequence)
        self._passed.clear()

    def discard(self, sequence: Sequence) -> None:
        """Count one out that waits here and ends now: its state is not WAITING when the queue is next asked."""
        assert sequence.state is SequenceState.WAITING
        turns = self._classes[sequence.request.priority]
        turns.discard(turns.account_of(sequence))
        self.num_sequences -= 1
        self._drop_if_empty(sequence.request.priority)

    def turns_of(self, priority: int) -> FairTurns:
        """The tenants that wait or run in a priority in which somebody does."""
        return self._classes[priority]

    def claim(self, priority: int, account: Account) -> None:
        """Room is being made for this tenant's first one: it goes before all of its priority, once."""
        self._claim = (priority, account)

    def claim_for_others(self, sequence: Sequence, may_go: Callable[[Sequence], bool]) -> bool:
        """Let the first one of another tenant, that `may_go`, go before the one that `peek` has just returned."""
        priority = sequence.request.priority
        turns = self._classes[priority]
        own = turns.account_of(sequence)
        others = [
            account
            for account in turns.accounts.values()
            if account is not own and (head := account.head()) is not None and may_go(head)
        ]
        if others:
            self.claim(priority, min(others, key=lambda account: account.served_until))
        return bool(others)

    def newest_of_longest(self, may_go: Callable[[Sequence], bool]) -> Sequence | None:
        """Whom a full queue does without: of the tenant that has most waiting for its weight, who came last.

        Of those that `may_go`, those of the worst priority first.
        """
        waiting: dict[str, float] = {}
        for turns in self._classes.values():
            for tenant, account in turns.accounts.items():
                if account.num_waiting:
                    waiting[tenant] = waiting.get(tenant, 0.0) + account.num_waiting / account.weight
        for tenant in sorted(waiting, key=waiting.__getitem__, reverse=True):
            for priority in sorted(self._classes, reverse=True):
                theirs = self._classes[priority].accounts.get(tenant)
                if theirs is not None and (sequence := theirs.newest(may_go)) is not None:
                    return sequence
        return None

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the counts are those of the sequences that wait."""
        for turns in self._classes.values():
            turns.check_integrity()
        if sum(turns.num_waiting for turns in self._classes.values()) + self.num_passed != self.num_sequences:
            raise IntegrityError("a sequence waits uncounted, or is counted and does not wait")

    def _push(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        turns = self._classes.get(priority)
        if turns is None:
            turns = self._classes[priority] = FairTurns()
        if priority not in self._listed:
            heappush(self._priorities, priority)
            self._listed.add(priority)
        turns.push(sequence)

    def _first(self) -> tuple[int, Account] | None:
        """The priority and the tenant of who goes first."""
        while self._priorities:
            priority = self._priorities[0]
            turns = self._classes.get(priority)
            if turns is None or not turns.num_waiting:
                self._listed.remove(heappop(self._priorities))
                continue
            if self._claim is not None and self._claim[0] == priority:
                if self._claim[1].num_waiting:
                    return self._claim
                self._claim = None
            account = turns.best()
            assert account is not None, "somebody waits and it is nobody's turn"
            return priority, account
        return None

    def _drop_if_empty(self, priority: int) -> None:
        """Once nobody waits or runs, nobody owes anybody a turn."""
        turns = self._classes[priority]
        if not turns.num_waiting and not turns.num_running:
            del self._classes[priority]
            if self._claim is not None and self._claim[0] == priority:
                self._claim = None
