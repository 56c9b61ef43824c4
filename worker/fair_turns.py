"""Whose turn it is among the tenants of one priority. Standard library only: no clock.

Start-time fair queueing. Each tenant has an account of what it was given: tokens over its weight. The next turn is that
of the waiting tenant that was given least:

    turn of a tenant   = served_until                     now: the latest turn that was taken
    beginning to wait  : served_until = max(now, served_until)
    taking it          : now = max(now, turn);  served_until = turn + cost / weight
    at the end         : served_until is put right by what it has really cost

So tenants that always wait get tokens in proportion to their weights, whatever each asks for; one that was idle begins
at `now`, with neither debt nor credit. Who gives its place up unfinished has paid nothing, and its tenant's turn is
again where it was.

Source: Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996; with one queue for each tenant, whose head gets its
start tag when it is taken and not when it comes, so that a wrong guess of a cost is put right at once.
"""

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from pagoda.worker.errors import IntegrityError
from pagoda.worker.sequence import Sequence, SequenceState

_MAX_ENDED = 64
"""Beside as many as there are live ones: a short queue is not worth sweeping."""


class Account:
    """One tenant's: its waiting sequences, first come first, and what it was given."""

    __slots__ = ("num_running", "num_waiting", "queue", "served_until", "version", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.served_until = 0.0
        self.num_waiting = 0
        self.num_running = 0
        self.queue: deque[Sequence] = deque()
        """By arrival. Who ends in here stays until it comes to the front, or until there are too many such ones."""
        self.version = 0
        """Of its entry among the turns: older ones are void."""

    def push(self, sequence: Sequence) -> None:
        """Into its place, which is the end unless it has been here before."""
        if len(self.queue) > 2 * self.num_waiting + _MAX_ENDED:
            self.queue = deque(self.live())
        index = len(self.queue)
        if self.queue and _arrival(self.queue[-1]) > _arrival(sequence):
            index = next(i for i, other in enumerate(self.queue) if _arrival(other) > _arrival(sequence))
        self.queue.insert(index, sequence)

    def head(self) -> Sequence | None:
        """The one that came first and still waits."""
        while self.queue and self.queue[0].state is not SequenceState.WAITING:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def live(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.queue if sequence.state is SequenceState.WAITING)

    def newest(self, may_go: Callable[[Sequence], bool]) -> Sequence | None:
        """The one of those that wait and `may_go` that came last."""
        while self.queue and self.queue[-1].state is not SequenceState.WAITING:
            self.queue.pop()
        return next((s for s in reversed(self.queue) if s.state is SequenceState.WAITING and may_go(s)), None)


class FairTurns:
    """The accounts of one priority. There are no more of them than tenants that wait, run or were given too much."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.num_waiting = 0
        """Those that wait here, without those that were passed over."""
        self.num_running = 0
        self.now = 0.0
        self._turns: list[tuple[float, int, int, int, Account]] = []
        """A heap of (turn, arrival, index, version, account). What an entry says is never later than it really is."""
        self._sweep_at = _MAX_ENDED

    def account_of(self, sequence: Sequence) -> Account:
        tenant, weight = sequence.request.tenant, sequence.request.weight
        account = self.accounts.get(tenant)
        if account is None:
            if len(self.accounts) >= self._sweep_at:
                self._forget_idle()
            account = self.accounts[tenant] = Account(weight)
        account.weight = weight
        return account

    def push(self, sequence: Sequence) -> None:
        account = self.account_of(sequence)
        if account.num_waiting == 0 and sequence.num_preemptions == 0:
            account.served_until = max(self.now, account.served_until)
        account.push(sequence)
        account.num_waiting += 1
        self.num_waiting += 1
        if account.queue[0] is sequence:
            self._enter(account)

    def best(self) -> Account | None:
        """The tenant whose turn it is."""
        while self._turns:
            turn, arrival, index, version, account = self._turns[0]
            if version != account.version or (head := account.head()) is None:
                heappop(self._turns)
                continue
            real = (account.served_until, head.arrival, head.index)
            if real == (turn, arrival, index):
                return account
            heapreplace(self._turns, (*real, version, account))
        return None

    def take(self, account: Account, cost: float, *, is_out_of_turn: bool) -> Sequence:
        """Its first one starts, and will cost about `cost` tokens. Out of turn it moves nobody else's turn."""
        sequence = self.remove_head(account)
        turn = account.served_until
        if not is_out_of_turn:
            self.now = max(self.now, turn)
        account.served_until = turn + cost / account.weight
        account.num_running += 1
        self.num_running += 1
        sequence.order = (sequence.request.priority, max(self.now, turn), sequence.arrival, sequence.index)
        sequence.charge = cost
        self._enter(account)
        return sequence

    def remove_head(self, account: Account) -> Sequence:
        """The one that `head` has just returned no longer waits here."""
        self.discard(account)
        sequence = account.queue.popleft()
        self._enter(account)
        return sequence

    def discard(self, account: Account) -> None:
        """One of its sequences ends while it waits: its state is another one when the queue is next asked."""
        account.num_waiting -= 1
        self.num_waiting -= 1

    def settle(self, sequence: Sequence, cost: float) -> None:
        """One that ran runs no more, and has cost `cost` tokens."""
        account = self.account_of(sequence)
        account.served_until += (cost - sequence.charge) / account.weight
        account.num_running -= 1
        self.num_running -= 1
        self._enter(account)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the counts are those of the sequences that wait."""
        accounts = self.accounts.values()
        if any(sum(1 for _ in account.live()) != account.num_waiting for account in accounts):
            raise IntegrityError("a sequence waits uncounted, or is counted and does not wait")
        if (self.num_waiting, self.num_running) != (
            sum(account.num_waiting for account in accounts),
            sum(account.num_running for account in accounts),
        ):
            raise IntegrityError("the tenants' counts do not add up")
        if any(list(account.live()) != sorted(account.live(), key=_arrival) for account in accounts):
            raise IntegrityError("a tenant's sequences are out of order")

    def _enter(self, account: Account) -> None:
        """Say anew when its turn is."""
        account.version += 1
        head = account.head()
        if head is None:
            return
        heappush(self._turns, (account.served_until, head.arrival, head.index, account.version, account))
        if len(self._turns) > 2 * len(self.accounts) + _MAX_ENDED:
            self._turns = [entry for entry in self._turns if entry[3] == entry[4].version]
            heapify(self._turns)

    def _forget_idle(self) -> None:
        """Of tenants that have nothing here and no debt there is nothing to remember."""
        self.accounts = {
            tenant: account
            for tenant, account in self.accounts.items()
            if account.num_waiting or account.num_running or account.served_until > self.now
        }
        self._sweep_at = 2 * len(self.accounts) + _MAX_ENDED


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival, sequence.index
