"""Who has to make room for whom when tenants hold more, or less, than their share. Standard library only.

A share is a tenant's part, by weight, of what the tenants that run or wait in one priority could hold together. Room is
never made by a tenant's first running sequence: so each tenant that runs anything gets on, and whoever is ahead of all
others is never interrupted for the sake of shares.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from pagoda.worker.fair_turns import Account, FairTurns
from pagoda.worker.sequence import Sequence

_BURST_SHARES = 4.0
"""What a tenant may be given before its turn, of what it holds at its share: more than usual may come at once."""
_SPARE_PART = 8
"""One place in so many is kept for tenants within their share, while there are some."""
_ROUNDING = 1e-9
"""What a sum of weights may be wrong by."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Room for one tenant's next sequence, that another tenant's last one gives."""

    account: Account
    victim: Sequence


def takes_spare_place(turns: FairTurns, sequence: Sequence, *, num_running: int, capacity: int) -> bool:
    """Whether a waiting sequence, started beside `num_running`, would take one of the last of all `capacity` places.

    They are kept from a tenant that has its share and wants much more than another one, whose next request may come any
    moment: to make room for each of these by interrupting somebody would cost more than a place that is free.
    """
    if num_running < capacity - capacity // _SPARE_PART:
        return False
    active = {tenant: a for tenant, a in turns.accounts.items() if a.num_waiting or a.num_running}
    account = active[sequence.request.tenant]
    share = account.weight / sum(each.weight for each in active.values()) * capacity
    return account.num_running >= share and any(2 * _demand(a) <= _demand(account) for a in active.values())


def newest_of_largest(running: List[Sequence], size: Callable[[Sequence], float]) -> Sequence:
    """Who gives up its blocks when somebody needs one: of the tenant that holds most for its weight, who goes last.

    `running` is in order, and so is the answer's priority the worst. A tenant's first one goes only as the last of all.
    """
    priority = running[-1].request.priority
    held: dict[str, float] = {}
    last: dict[str, Sequence] = {}
    is_first: dict[str, bool] = {}
    for sequence in running:
        if sequence.request.priority == priority:
            tenant = sequence.request.tenant
            held[tenant] = held.get(tenant, 0.0) + size(sequence) / sequence.request.weight
            is_first[tenant] = tenant not in last
            last[tenant] = sequence
    candidates = [tenant for tenant in held if not is_first[tenant]]
    return last[max(candidates, key=held.__getitem__)] if candidates else running[-1]


def swap_for_share(
    turns: FairTurns,
    running: Iterable[Sequence],
    *,
    capacity: float,
    size: Callable[[Sequence], float],
    may_start: Callable[[Sequence], bool],
) -> Swap | None:
    """Whose next sequence may take the place of whose last one, if anybody's may.

    The one must stay within its share with it, the other must keep its share without. Or the one wants no more than
    half of what the other does, and was not given much more than its turns: then a quarter of its share must do for it.
    So a tenant whose requests come at random, and are no more than its share on average, need not wait for a flood.

    `running` are those of the priority of `turns`, in order; together they may hold `capacity`, each holds its `size`.
    """
    held: dict[str, float] = {}
    last: dict[str, Sequence] = {}
    for sequence in running:
        tenant = sequence.request.tenant
        held[tenant] = held.get(tenant, 0.0) + size(sequence)
        last[tenant] = sequence
    active = {tenant: a for tenant, a in turns.accounts.items() if a.num_waiting or a.num_running}
    unit = capacity / sum(account.weight for account in active.values()) + _ROUNDING

    def giver_that_keeps(part: float) -> str | None:
        left = {t: held[t] - size(last[t]) for t in held if active[t].num_running > 1}
        givers = [t for t in left if left[t] >= (part * unit - 2 * _ROUNDING) * active[t].weight]
        return max(givers, key=lambda t: held[t] / active[t].weight, default=None)

    def lead(tenant: str, account: Account) -> float:
        """What it was given beyond its turn, as what its sequences hold."""
        tokens = max(0.0, account.served_until - turns.now) * account.weight
        return tokens * size(last[tenant]) / max(1.0, last[tenant].charge) if tenant in last else 0.0

    def is_no_flood(tenant: str, beside: str, *, has_taken: float) -> bool:
        account = active[tenant]
        is_due = lead(tenant, account) - has_taken <= _BURST_SHARES * unit * account.weight
        return is_due and 2 * _demand(account) <= _demand(active[beside])

    def may_take(tenant: str, giver: str, head: Sequence, part: float) -> bool:
        if part < 1.0:
            return is_no_flood(tenant, giver, has_taken=0.0)
        is_within_share = held.get(tenant, 0.0) + size(head) <= unit * active[tenant].weight
        return is_within_share and not is_no_flood(giver, tenant, has_taken=size(last[giver]))

    for part in (1.0, 0.25):
        giver = giver_that_keeps(part)
        if giver is None:
            continue
        takers = [
            account
            for tenant, account in active.items()
            if (head := account.head()) is not None and may_take(tenant, giver, head, part) and may_start(head)
        ]
        if takers:
            return Swap(min(takers, key=lambda account: (account.served_until, _arrival(account))), last[giver])
    return None


def _demand(account: Account) -> float:
    return (account.num_running + account.num_waiting) / account.weight


def _arrival(account: Account) -> int:
    head = account.head()
    assert head is not None
    return head.arrival
