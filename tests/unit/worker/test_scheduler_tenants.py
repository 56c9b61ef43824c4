"""Who is admitted, who makes room and who is shed when several tenants want more than there is."""

from collections import Counter

from fakes import Replica
from scheduling import prompt, started

from pagoda.worker.deadlines import Pace, TimeLimits
from pagoda.worker.types import FinishReason, RequestId

UNKNOWN = Pace()


def flood(replica: Replica, tenant: str, num: int, *, num_tokens: int = 4, first: int = 0, **options: object) -> None:
    for index in range(first, first + num):
        tokens = [(7 * index + offset) % 60 for offset in range(num_tokens)]
        replica.add(f"{tenant}{index}", tokens, tenant=tenant, salt=tenant.encode(), ignore_eos=True, **options)


def running(replica: Replica) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in replica.scheduler._running)


def test_places_go_round() -> None:
    """A flood came first; the other tenant's few are through long before it is."""
    replica = Replica(max_num_seqs=1)
    flood(replica, "flood", 20, max_tokens=4)
    flood(replica, "few", 3, max_tokens=4)
    order = []
    while len(order) < 8:
        order += [name.rstrip("0123456789/") for name in started(replica.step())]
    assert order.count("few") == 3
    replica.run()
    replica.check_outputs()


def test_tenant_under_its_share_gets_a_place_at_once() -> None:
    """All places are held for long by a flood, and half of them are the newcomer's: in the next step it runs.

    Step by step it gets its half, and no more; the flood's first ones are left alone.
    """
    replica = Replica(max_num_seqs=4, num_blocks=256)
    flood(replica, "flood", 8, max_tokens=100)
    replica.step()
    flood(replica, "few", 6, max_tokens=100)
    plan = replica.step()
    assert (plan.dropped, started(plan)) == (["flood3/0"], ["few0/0"])
    for _ in range(6):
        replica.step()
    assert running(replica) == {"flood": 2, "few": 2}
    assert replica.stats.num_preemptions == 2
    assert {"flood0/0", "flood1/0"} <= {s.sequence_id for s in replica.scheduler._running}
    replica.run()
    replica.check_outputs()


def test_few_requests_at_random_do_not_wait_for_a_flood() -> None:
    """Three at once are more than half of the places, but a small part of what the flood wants: they run at once.

    The flood keeps a place, and gets its part in the end.
    """
    replica = Replica(max_num_seqs=4, num_blocks=256)
    flood(replica, "flood", 90, max_tokens=10)
    replica.step()
    served: Counter[str] = Counter()
    for number in range(200):
        if number % 10 == 0:
            flood(replica, "few", 3, first=3 * number, max_tokens=10)
        replica.step()
        served += running(replica)
        if number == 3:
            assert running(replica) == {"flood": 1, "few": 3}
    assert served["flood"] > 260, (
        "half of all places and steps, but for what the others may have taken before their turn"
    )
    replica.run()
    replica.check_outputs()


def test_a_flood_leaves_a_few_places_to_who_comes_any_moment() -> None:
    """While the other one runs something: so its next request interrupts nobody. Alone, the flood has all of them."""
    replica = Replica(max_num_seqs=8, num_blocks=256)
    flood(replica, "few", 1, max_tokens=30)
    flood(replica, "flood", 40, max_tokens=10)
    replica.step()
    assert running(replica) == {"few": 1, "flood": 6}
    flood(replica, "few", 1, first=1, max_tokens=30)
    assert started(replica.step()) == ["few1/0"]
    assert replica.stats.num_preemptions == 0
    while "few" in running(replica):
        replica.step()
    replica.step()
    assert running(replica) == {"flood": 8}
    replica.run()
    replica.check_outputs()


def test_two_floods_leave_a_place_to_a_third_tenant() -> None:
    replica = Replica(max_num_seqs=8, num_blocks=256)
    flood(replica, "few", 1, max_tokens=30)
    for tenant in ("flood", "deluge"):
        flood(replica, tenant, 30, max_tokens=10)
    replica.step()
    assert sum(running(replica).values()) == 7
    flood(replica, "few", 1, first=1, max_tokens=30)
    assert started(replica.step()) == ["few1/0"]
    replica.run()
    replica.check_outputs()


def test_two_floods_do_not_take_each_other_s_places() -> None:
    replica = Replica(max_num_seqs=4, num_blocks=256)
    flood(replica, "a", 20, max_tokens=10)
    flood(replica, "b", 20, max_tokens=10)
    for _ in range(60):
        replica.step()
    assert replica.stats.num_preemptions <= 2
    replica.run()


def test_shares_follow_weights() -> None:
    replica = Replica(max_num_seqs=4, num_blocks=256)
    flood(replica, "flood", 8, max_tokens=100, weight=3.0)
    replica.step()
    flood(replica, "few", 3, max_tokens=100, weight=1.0)
    for _ in range(8):
        replica.step()
    assert running(replica) == {"flood": 3, "few": 1}


def test_nobody_makes_room_for_one_that_has_its_share() -> None:
    """Of three tenants each has one of three places; more of one of them wait for an end."""
    replica = Replica(max_num_seqs=3, num_blocks=256)
    for tenant in "abc":
        flood(replica, tenant, 1, max_tokens=30)
    replica.step()
    flood(replica, "a", 5, first=1, max_tokens=30)
    for _ in range(10):
        replica.step()
    assert running(replica) == {"a": 1, "b": 1, "c": 1}
    assert replica.stats.num_preemptions == 0


def test_one_place_is_not_fought_over() -> None:
    replica = Replica(max_num_seqs=1)
    flood(replica, "a", 3, max_tokens=20)
    replica.step()
    flood(replica, "b", 3, max_tokens=20)
    replica.run()
    assert replica.stats.num_preemptions == 0


def test_blocks_are_shared_too() -> None:
    """There are places, but the flood holds all blocks: its last ones give theirs up until the newcomer fits."""
    replica = Replica(num_blocks=32, max_num_seqs=8)
    flood(replica, "flood", 6, num_tokens=16, max_tokens=40)
    replica.step()
    replica.step()
    flood(replica, "few", 1, num_tokens=40, max_tokens=8)
    for _ in range(8):
        replica.step()
    assert running(replica)["few"] == 1
    replica.run(max_steps=2000)
    replica.check_outputs()


def test_who_grows_takes_the_blocks_of_who_holds_most() -> None:
    """The one that came last is within its share, so it is not its blocks that the flood's growth takes."""
    replica = Replica(num_blocks=24, max_num_seqs=8)
    flood(replica, "flood", 3, num_tokens=16, max_tokens=60)
    replica.step()
    flood(replica, "few", 1, num_tokens=4, max_tokens=60)
    steps = 0
    while replica.stats.num_preemptions == 0:
        assert steps < 100
        replica.step()
        steps += 1
    assert running(replica) == {"flood": 2, "few": 1}
    replica.run(max_steps=2000)
    replica.check_outputs()


def test_a_full_pool_and_many_tenants_come_to_an_end() -> None:
    """Everybody grows to a large part of the pool, nobody starves, and all get what they would get alone."""
    replica = Replica(num_blocks=8, max_num_seqs=4)
    for number, tenant in enumerate("abcd"):
        flood(replica, tenant, 4, num_tokens=5 + number, max_tokens=20, weight=1.0 + number)
    replica.run(max_steps=16 * 40)
    assert replica.stats.num_preemptions > 0
    replica.check_outputs()


# -- a queue that is full ------------------------------------------------------------------------


def shed(replica: Replica) -> list[str]:
    outputs = replica.scheduler.shed_excess()
    replica._take(outputs)
    replica.check()
    assert all(output.finish_reason is FinishReason.SHED for output in outputs)
    return [output.request_id for output in outputs]


def test_the_newest_of_the_longest_goes() -> None:
    """Room for five: a flood of five is there when two of another tenant come; the flood's last ones go for them."""
    replica = Replica(max_num_seqs=1, max_num_waiting=4)
    flood(replica, "flood", 5)
    assert shed(replica) == []
    flood(replica, "few", 2)
    assert shed(replica) == ["flood4", "flood3"]
    flood(replica, "flood", 1, first=9)
    assert shed(replica) == ["flood9"]
    replica.run()
    replica.check_outputs()


def test_whole_requests_go_and_none_that_has_begun() -> None:
    replica = Replica(max_num_seqs=1, max_num_waiting=4)
    replica.add("begun", prompt(3), n=4, max_tokens=9)
    replica.step()
    replica.add("late", prompt(3), n=3, max_tokens=9)
    assert shed(replica) == ["late"] * 3
    assert shed(replica) == []
    replica.run()
    assert replica.end("begun", 3).finish_reason is FinishReason.LENGTH


# -- deadlines -----------------------------------------------------------------------------------


def expire(replica: Replica, now_s: float, pace: Pace = UNKNOWN) -> list[tuple[RequestId, FinishReason | None]]:
    outputs = replica.scheduler.expire(now_s, pace)
    replica._take(outputs)
    replica.check()
    assert all((output.error is None) == (output.finish_reason is FinishReason.DEADLINE) for output in outputs)
    return [(output.request_id, output.finish_reason) for output in outputs]


def test_time_ends_what_runs_waits_or_was_preempted() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("preempted", prompt(3), priority=1, max_tokens=20, deadline_s=5.0)
    replica.step()
    replica.add("running", prompt(3, first=20), max_tokens=20, deadline_s=5.0)
    replica.step()
    replica.step()
    replica.add("waiting", prompt(3, first=40), priority=2, n=2, max_tokens=20, deadline_s=5.0)
    replica.add("later", prompt(3, first=50), priority=3, max_tokens=2, deadline_s=6.0)
    assert replica.stats.num_preemptions == 1
    assert expire(replica, 4.9) == []
    assert sorted(expire(replica, 5.0)) == [
        ("preempted", FinishReason.DEADLINE),
        ("running", FinishReason.DEADLINE),
        ("waiting", FinishReason.DEADLINE),
        ("waiting", FinishReason.DEADLINE),
    ]
    assert expire(replica, 5.0) == []
    replica.run()
    assert replica.end("later").finish_reason is FinishReason.LENGTH
    assert expire(replica, 7.0) == []


def test_what_can_no_longer_be_in_time_is_shed_before_it_begins() -> None:
    """A prompt of ten tokens takes a second here; half a second before the deadline it is not begun with any more."""
    pace = Pace(per_prefill_token_s=0.1)
    replica = Replica(max_num_seqs=1)
    replica.add("runs", prompt(10), max_tokens=20, deadline_s=5.0)
    assert expire(replica, 3.9, pace) == []
    replica.step()
    replica.add("waits", prompt(10, first=30), max_tokens=20, deadline_s=5.0)
    assert expire(replica, 3.9, pace) == []
    assert expire(replica, 4.5, pace) == [("waits", FinishReason.SHED)]
    assert expire(replica, 5.0, pace) == [("runs", FinishReason.DEADLINE)]


def test_long_outputs_are_reckoned_with() -> None:
    """Twice what the tenant's outputs were on average, and no more than was asked for."""
    pace = Pace(step_s=0.1)
    replica = Replica(max_num_seqs=1)
    replica.add("mean", prompt(3), max_tokens=10, ignore_eos=True)
    replica.run()
    replica.add("runs", prompt(3), max_tokens=60, ignore_eos=True)
    replica.step()
    replica.add("long", prompt(3, first=20), max_tokens=60, deadline_s=10.0)
    replica.add("short", prompt(3, first=30), max_tokens=5, deadline_s=10.0)
    assert expire(replica, 7.9, pace) == []
    assert expire(replica, 8.0, pace) == [("long", FinishReason.SHED)]
    assert expire(replica, 9.4, pace) == []
    assert expire(replica, 9.5, pace) == [("short", FinishReason.SHED)]


def test_one_that_never_had_enough_time_gets_what_there_is_time_for() -> None:
    """It asks for more than its time holds, as clients do that set no max_tokens: an idle worker must not refuse it."""
    pace = Pace(per_prefill_token_s=0.1, step_s=0.1)
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(3), max_tokens=100, limits=TimeLimits(begin_s=0.0, end_by_s=2.0))
    assert expire(replica, 1.5, pace) == []
    assert expire(replica, 1.7, pace) == [("a", FinishReason.SHED)]


def test_first_tokens_that_are_late_end_only_what_has_not_begun() -> None:
    limits = TimeLimits(first_token_by_s=5.0)
    replica = Replica(max_num_seqs=1)
    for name in ("runs", "waits"):
        replica.add(name, prompt(3), max_tokens=20, limits=limits)
    replica.step()
    pace = Pace(per_prefill_token_s=0.1, step_s=0.1)
    assert expire(replica, 4.5, pace) == []
    assert expire(replica, 4.6, pace) == [("waits", FinishReason.SHED)]
    assert expire(replica, 100.0, pace) == []
    replica.run()
    assert replica.end("runs").finish_reason is FinishReason.LENGTH


def test_what_is_cached_takes_no_time() -> None:
    pace = Pace(per_prefill_token_s=0.1)
    replica = Replica(max_num_seqs=1)
    replica.add("first", prompt(16), max_tokens=1)
    replica.run()
    replica.add("runs", prompt(3, first=40), max_tokens=20)
    replica.step()
    replica.add("cached", prompt(17), max_tokens=1, deadline_s=5.0)
    replica.add("new", prompt(17, first=30), max_tokens=1, deadline_s=5.0)
    assert expire(replica, 4.5, pace) == [("new", FinishReason.SHED)]


def test_ended_requests_leave_no_deadline_behind() -> None:
    """Deadlines are an hour away, and what is known of requests that ended long ago must not pile up until then."""
    replica = Replica()
    for number in range(1000):
        replica.add(f"r{number}", [1], max_tokens=1, deadline_s=3600.0)
        expire(replica, 1.0)
        replica.run()
    assert len(replica.scheduler._deadlines) < 200
