"""A plan can be repeated, and told before anything breaks."""

import pytest
from chaos_plan import ChaosPlan, Fault, FaultKind

KILL, PAUSE = FaultKind.KILL_WORKER, FaultKind.PAUSE_WORKER


def test_same_seed_same_faults() -> None:
    mix = {KILL: 1.0, PAUSE: 5.0}
    plan = ChaosPlan(7, 60.0, mix)
    assert plan.faults == ChaosPlan(7, 60.0, mix).faults
    assert plan.faults != ChaosPlan(8, 60.0, mix).faults
    assert len(list(plan.lines())) == 1 + 60 + 12


def test_one_fault_in_each_period() -> None:
    """A kill a second is one in each second, at a time that nobody could guess."""
    times = [fault.at_s for fault in ChaosPlan(1, 120.0, {KILL: 1.0}).faults]
    assert [int(at_s) for at_s in times] == list(range(120))
    assert len({round(at_s % 1, 3) for at_s in times}) > 100


def test_one_more_kind_leaves_the_others_alone() -> None:
    alone = ChaosPlan(1, 60.0, {KILL: 2.0}).faults
    mixed = ChaosPlan(1, 60.0, {PAUSE: 3.0, KILL: 2.0}).faults
    assert [fault for fault in mixed if fault.kind is KILL] == alone
    assert mixed == sorted(mixed, key=lambda fault: fault.at_s)


@pytest.mark.parametrize(("place", "victim"), [(0.0, "a"), (0.49, "a"), (0.5, "b"), (0.999, "b")])
def test_victims(place: float, victim: str) -> None:
    assert Fault(0.0, KILL, place, 0.0).victim(["a", "b"]) == victim
