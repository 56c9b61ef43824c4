"""What the scheduler plans within its budget, and its books."""

import pytest
from fakes import Replica
from scheduling import greedy, prompt

from pagoda.worker.errors import IntegrityError

# -- budget ------------------------------------------------------------------------------------


def test_long_prompt_is_computed_in_chunks() -> None:
    """A step computes no more tokens than its budget; the token comes with the last chunk."""
    replica = Replica(max_num_batched_tokens=4)
    replica.add("a", prompt(10), max_tokens=3)
    assert [replica.step().num_scheduled_tokens["a/0"] for _ in range(5)] == [4, 4, 2, 1, 1]
    assert replica.output("a") == greedy(prompt(10), 3)


def test_decodes_go_before_chunks() -> None:
    """A sequence that decodes gets its token in every step, first in the plan; the prompt gets what is left."""
    replica = Replica(max_num_batched_tokens=4)
    replica.add("a", prompt(10), priority=1, max_tokens=8)
    for _ in range(3):
        replica.step()
    replica.add("b", prompt(9, first=30), priority=0, max_tokens=8)
    plans = [replica.step() for _ in range(4)]
    assert [list(plan.num_scheduled_tokens.items()) for plan in plans] == [
        [("a/0", 1), ("b/0", 3)],
        [("a/0", 1), ("b/0", 3)],
        [("a/0", 1), ("b/0", 3)],
        [("b/0", 1), ("a/0", 1)],
    ]


def test_one_step_starts_as_many_as_the_budget_holds() -> None:
    """The last one in starts with a chunk; nobody passes it."""
    replica = Replica(max_num_batched_tokens=16)
    for first, name in enumerate("abcd"):
        replica.add(name, prompt(7, first=10 * first))
    assert replica.step().num_scheduled_tokens == {"a/0": 7, "b/0": 7, "c/0": 2}
    assert replica.step().num_scheduled_tokens == {"a/0": 1, "b/0": 1, "c/0": 5, "d/0": 7}


# -- books -------------------------------------------------------------------------------------


def test_stats_count() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(9), max_tokens=3)
    replica.add("b", prompt(9), max_tokens=3)
    replica.step()
    stats = replica.stats
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    replica.run()
    stats = replica.stats
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (18, 8, 14)


def test_aborted_while_waiting_count_no_more() -> None:
    """None of them ever reaches the front of the queue."""
    replica = Replica(max_num_seqs=1)
    replica.add("running", prompt(3), max_tokens=None)
    replica.step()
    replica.add("first", prompt(3), max_tokens=1)
    for index in range(500):
        replica.add(f"late{index}", prompt(3), max_tokens=1)
        replica.abort(f"late{index}")
    assert replica.stats.num_waiting == 1
    replica.check()


def test_lost_sequence_is_an_integrity_error() -> None:
    """A sequence that is in no queue would never end; the check finds it."""
    replica = Replica()
    replica.add("a", prompt(3))
    replica.step()
    replica.scheduler._running.clear()
    with pytest.raises(IntegrityError):
        replica.scheduler.check_integrity()
