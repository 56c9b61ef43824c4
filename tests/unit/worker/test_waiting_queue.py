"""Who comes out of the waiting queue, and what it remembers of those who ended in it."""

import random

import pytest

from pagoda.worker.errors import IntegrityError
from pagoda.worker.sequence import Sequence, SequenceState, samples_of
from pagoda.worker.types import Request, RequestId, SamplingParams
from pagoda.worker.waiting_queue import WaitingQueue


def sequence(arrival: int, *, priority: int = 0) -> Sequence:
    request = Request(RequestId(f"{priority}.{arrival}"), (1,), SamplingParams(), priority=priority)
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


def pop_all(queue: WaitingQueue) -> list[Sequence]:
    popped = []
    while (head := queue.peek()) is not None:
        assert queue.pop() is head
        popped.append(head)
    assert queue.num_sequences == 0
    return popped


def test_random_use_matches_a_sorted_list() -> None:
    """Pushes, pops, ends and passes in random order, beside a list that is sorted before each look."""
    random_source = random.Random(1)
    queue, model, passed = WaitingQueue(), [], []
    for arrival in range(3000):
        model.sort(key=lambda sequence: sequence.order)
        assert queue.peek() is (model[0] if model else None)
        match random_source.randrange(7):
            case 0 if model:
                assert queue.pop() is model.pop(0)
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
    assert pop_all(queue) == sorted([*model, *passed], key=lambda sequence: sequence.order)


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
    assert len(queue._heap) < 100
    assert pop_all(queue) == [first]


def test_an_end_that_is_not_told_is_an_integrity_error() -> None:
    queue = WaitingQueue()
    waiting = sequence(0)
    queue.push(waiting)
    waiting.state = SequenceState.FINISHED
    with pytest.raises(IntegrityError):
        queue.check_integrity()


def test_order_survives_the_sweep() -> None:
    """Most of those that came in random order end; sweeping them out leaves the others in order."""
    random_source = random.Random(2)
    queue = WaitingQueue()
    sequences = [sequence(arrival) for arrival in range(500)]
    random_source.shuffle(sequences)
    for waiting in sequences:
        queue.push(waiting)
    for waiting in sequences[50:]:
        end(queue, waiting)
    last = sequence(1000)
    queue.push(last)
    assert len(queue._heap) == 51, "the push has swept"
    assert pop_all(queue) == sorted([*sequences[:50], last], key=lambda sequence: sequence.order)
