"""Who comes out of the waiting queue, and what it remembers of those who ended in it."""

import random
from collections import Counter

import pytest

from pagoda.worker.errors import IntegrityError
from pagoda.worker.sequence import Sequence, SequenceState, samples_of
from pagoda.worker.types import Request, RequestId, SamplingParams
from pagoda.worker.waiting_queue import WaitingQueue


def sequence(arrival: int, *, priority: int = 0, tenant: str = "", weight: float = 1.0) -> Sequence:
    request = Request(
        RequestId(f"{priority}.{arrival}"), (1,), SamplingParams(), priority=priority, tenant=tenant, weight=weight
    )
    (sample,) = samples_of(
        request,
        arrival=arrival,
        seed=0,
        max_model_len=16,
        eos_token_ids=frozenset(),
        hash_chain=None,
        block_size=4,
    )
    return sample


def end(queue: WaitingQueue, sequence: Sequence) -> None:
    """As the scheduler ends one that waits."""
    queue.discard(sequence)
    sequence.state = SequenceState.FINISHED


def by_arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival


def pop_all(queue: WaitingQueue) -> list[Sequence]:
    popped = []
    while (head := queue.peek()) is not None:
        assert queue.pop(1.0) is head
        popped.append(head)
    assert queue.num_sequences == 0
    return popped


def test_random_use_matches_a_sorted_list() -> None:
    """Pushes, pops, ends and passes in random order, beside a list that is sorted before each look."""
    random_source = random.Random(1)
    queue, model, passed = WaitingQueue(), [], []
    for arrival in range(3000):
        model.sort(key=by_arrival)
        assert queue.peek() is (model[0] if model else None)
        match random_source.randrange(7):
            case 0 if model:
                assert queue.pop(1.0) is model.pop(0)
            case 1 if model:
                end(queue, model.pop(random_source.randrange(len(model))))
            case 2 if model:
                queue.pass_over()
                passed.append(model.pop(0))
            case 3:
                queue.restore()
                model += passed
                passed.clear()
            case _:
                model.append(sequence(arrival, priority=random_source.randrange(3)))
                queue.push(model[-1])
        assert (queue.num_sequences, queue.num_passed) == (len(model) + len(passed), len(passed))
        queue.check_integrity()
    queue.restore()
    assert pop_all(queue) == sorted([*model, *passed], key=by_arrival)


def test_ended_ones_do_not_pile_up() -> None:
    """Nobody comes to the front, and each one that is pushed ends: the queue is swept as it grows."""
    queue = WaitingQueue()
    first = sequence(0)
    queue.push(first)
    for arrival in range(1, 500):
        late = sequence(arrival)
        queue.push(late)
        end(queue, late)
    assert queue.num_sequences == 1
    assert len(queue.turns_of(0).accounts[""].queue) < 100
    assert pop_all(queue) == [first]


def test_an_end_that_is_not_told_is_an_integrity_error() -> None:
    queue = WaitingQueue()
    waiting = sequence(0)
    queue.push(waiting)
    waiting.state = SequenceState.FINISHED
    with pytest.raises(IntegrityError):
        queue.check_integrity()


def test_order_survives_the_sweep() -> None:
    """Most of them end; sweeping them out leaves the others in order."""
    random_source = random.Random(2)
    queue = WaitingQueue()
    sequences = [sequence(arrival) for arrival in range(500)]
    for waiting in sequences:
        queue.push(waiting)
    random_source.shuffle(sequences)
    for waiting in sequences[50:]:
        end(queue, waiting)
    last = sequence(1000)
    queue.push(last)
    assert len(queue.turns_of(0).accounts[""].queue) == 51, "the push has swept"
    assert pop_all(queue) == sorted([*sequences[:50], last], key=by_arrival)


# -- tenants -----------------------------------------------------------------------------------


def start(queue: WaitingQueue, cost: float = 1.0) -> Sequence:
    """As the scheduler starts the one whose turn it is."""
    started = queue.pop(cost)
    started.state = SequenceState.RUNNING
    return started


def stop(queue: WaitingQueue, started: Sequence, cost: float) -> None:
    """As the scheduler ends one that runs."""
    started.state = SequenceState.FINISHED
    queue.settle(started, cost)


def served(queue: WaitingQueue, num_turns: int, costs: dict[str, float]) -> Counter[str]:
    """Tokens that each tenant gets in so many turns, one at a time, of sequences that cost so much."""
    tokens: Counter[str] = Counter()
    for _ in range(num_turns):
        head = queue.peek()
        assert head is not None
        cost = costs[head.request.tenant]
        stop(queue, start(queue, cost), cost)
        tokens[head.request.tenant] += int(cost)
    queue.check_integrity()
    return tokens


def flood(queue: WaitingQueue, tenant: str, num: int, *, first: int = 0, weight: float = 1.0) -> None:
    for arrival in range(first, first + num):
        queue.push(sequence(arrival, tenant=tenant, weight=weight))


def test_tenants_share_by_weight_whatever_their_requests_cost() -> None:
    """One asks for much each time, one for little, and one has twice the weight: tokens follow the weights."""
    queue = WaitingQueue()
    flood(queue, "much", 2000)
    flood(queue, "little", 2000, first=2000)
    flood(queue, "heavy", 2000, first=4000, weight=2.0)
    tokens = served(queue, 1000, {"much": 100, "little": 7, "heavy": 20})
    assert tokens["much"] == pytest.approx(tokens["little"], rel=0.05)
    assert tokens["heavy"] == pytest.approx(2 * tokens["little"], rel=0.05)


def test_one_that_comes_late_does_not_wait_behind_a_flood() -> None:
    queue = WaitingQueue()
    flood(queue, "flood", 500)
    served(queue, 100, {"flood": 50})
    flood(queue, "late", 3, first=500)
    head = [start(queue, 50).request.tenant for _ in range(6) if queue.peek()]
    assert head.count("late") == 3


def test_idle_tenants_save_up_no_credit() -> None:
    """One that was away for a hundred turns takes turns from now on; it does not take a hundred first."""
    queue = WaitingQueue()
    flood(queue, "busy", 500)
    flood(queue, "away", 1, first=500)
    served(queue, 102, {"busy": 10, "away": 10})
    flood(queue, "away", 100, first=501)
    assert served(queue, 40, {"busy": 10, "away": 10}) == {"busy": 200, "away": 200}


def test_a_wrong_guess_is_put_right() -> None:
    """Both are thought to cost the same, one costs ten times as much: it gets a tenth of the turns."""
    queue = WaitingQueue()
    flood(queue, "dear", 500)
    flood(queue, "cheap", 500, first=500)
    turns: Counter[str] = Counter()
    for _ in range(220):
        assert queue.peek()
        started = start(queue, 50)
        stop(queue, started, 100 if started.request.tenant == "dear" else 10)
        turns[started.request.tenant] += 1
    assert turns["cheap"] == pytest.approx(10 * turns["dear"], rel=0.15)


def test_who_gives_up_its_place_has_paid_nothing_and_keeps_its_turn() -> None:
    queue = WaitingQueue()
    flood(queue, "a", 2)
    flood(queue, "b", 2, first=2)
    first = queue.peek()
    started = start(queue, 100)
    assert started is first
    queue.settle(started, 0)
    started.state = SequenceState.WAITING
    queue.push(started)
    assert [start(queue, 100).request.request_id for _ in range(4) if queue.peek()] == ["0.0", "0.2", "0.1", "0.3"]


def test_priority_goes_before_turns() -> None:
    queue = WaitingQueue()
    flood(queue, "a", 5)
    served(queue, 1, {"a": 1})
    queue.push(sequence(10, priority=-1, tenant="a"))
    head = queue.peek()
    assert head is not None
    assert head.arrival == 10


def test_nothing_is_remembered_of_tenants_that_left() -> None:
    """Ten thousand tenants come, are served and go, while one that stays takes turns with them."""
    queue = WaitingQueue()
    flood(queue, "stays", 12_000)
    for arrival in range(10_000, 20_000):
        queue.push(sequence(arrival, tenant=str(arrival)))
        for _ in range(2):
            if queue.peek():
                stop(queue, start(queue, 5), 5)
    turns = queue.turns_of(0)
    assert len(turns.accounts) < 300
    assert len(turns._turns) < 1000
    assert len(queue._priorities) == 1


def test_order_of_those_that_run_is_the_order_of_turns() -> None:
    """So that newcomers never come to stand before those that run."""
    queue = WaitingQueue()
    random_source = random.Random(3)
    orders = []
    for arrival in range(500):
        queue.push(sequence(arrival, tenant=random_source.choice("abcd"), weight=random_source.choice((1.0, 2.0))))
        if random_source.random() < 0.8 and queue.peek():
            orders.append(start(queue, random_source.randrange(1, 50)).order)
    assert [order[1] for order in orders] == sorted(order[1] for order in orders)


def test_a_full_queue_does_without_the_newest_of_the_longest() -> None:
    """By weight: six of weight three wait less than three of weight one."""
    queue = WaitingQueue()
    flood(queue, "heavy", 6, weight=3.0)
    flood(queue, "long", 3, first=6)
    flood(queue, "short", 1, first=20)
    newest = queue.newest_of_longest(lambda _: True)
    assert newest is not None
    assert (newest.request.tenant, newest.arrival) == ("long", 8)
    untouchable = {8, 7}
    newest = queue.newest_of_longest(lambda sequence: sequence.arrival not in untouchable)
    assert newest is not None
    assert newest.arrival == 6
    newest = queue.newest_of_longest(lambda sequence: sequence.request.tenant == "short")
    assert newest is not None
    assert newest.arrival == 20
    assert queue.newest_of_longest(lambda _: False) is None


def test_the_worst_priority_goes_first_from_a_full_queue() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, priority=5))
    queue.push(sequence(1, priority=0))
    newest = queue.newest_of_longest(lambda _: True)
    assert newest is not None
    assert newest.arrival == 0


def test_claimed_room_goes_to_its_tenant_once() -> None:
    queue = WaitingQueue()
    flood(queue, "a", 3)
    flood(queue, "b", 3, first=3)
    turns = queue.turns_of(0)
    turns.accounts["b"].served_until = 1000.0
    queue.claim(0, turns.accounts["b"])
    assert [start(queue, 10).arrival for _ in range(3) if queue.peek()] == [3, 0, 1]
    assert turns.now < 1000.0, "out of turn it moves nobody's turn"
