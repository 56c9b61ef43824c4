"""Samples of one request share their prompt."""

import pytest
from fakes import Replica
from scheduling import prompt, started


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("num_prompt_tokens", "num_shared"), [(8, 2), (10, 2), (3, 0), (1, 0), (4, 1)])
def test_samples_share_the_prompts_full_blocks(
    num_prompt_tokens: int, num_shared: int, enable_prefix_caching: bool
) -> None:
    """The first sample computes the prompt; the others share its full blocks and copy the open one, if any."""
    replica = Replica(enable_prefix_caching=enable_prefix_caching)
    replica.add("a", prompt(num_prompt_tokens), n=3, temperature=1.0, seed=7, max_tokens=6)
    first = replica.step()
    assert started(first) == ["a/0"]
    plan = replica.step()
    assert started(plan) == ["a/1", "a/2"]
    parents = list(first.new[0].block_tables[0])
    copies = []
    for new in plan.new:
        (table,) = new.block_tables
        assert list(table[:num_shared]) == parents[:num_shared]
        assert not set(table[num_shared:]) & set(parents)
        assert (new.num_computed_tokens, new.num_shared_tokens) == (num_prompt_tokens - 1, 4 * num_shared)
        copies += zip(parents[num_shared:], table[num_shared:], strict=True)
    assert plan.block_copies == copies
    replica.run()
    replica.check_outputs()
    assert len({tuple(replica.output("a", index)) for index in range(3)}) == 3
    assert replica.stats.num_computed_tokens == num_prompt_tokens + 2 + 3 * 5


def test_samples_of_an_ended_parent_run_alone() -> None:
    """The first sample ends before there is a slot for the second, which then starts like any other request."""
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(10), n=2, temperature=1.0, max_tokens=3)
    replica.run()
    replica.check_outputs()


def test_preempted_sample_runs_alone() -> None:
    """Samples fill the pool as they grow; who was preempted computes the prompt again, and all get their tokens."""
    replica = Replica(num_blocks=8, enable_prefix_caching=False)
    replica.add("a", prompt(10), n=3, temperature=1.0, seed=1, max_tokens=16)
    replica.run()
    assert replica.stats.num_preemptions > 0
    replica.check_outputs()


def test_sample_does_not_copy_a_block_that_is_only_being_computed() -> None:
    """A copy is made before the step writes, so its source must be real.

    b/0 is preempted with 9 tokens, before there is a slot for b/1. It comes back in the very step in which d computes
    the two blocks that it hits; b/1 needs a copy of the second one, and waits for the next step.
    """
    replica = Replica(max_num_seqs=3)
    for name in "xy":
        replica.add(name, [50], max_tokens=None)
    replica.add("b", prompt(5), n=2, priority=1, max_tokens=20)
    for _ in range(4):
        replica.step()
    replica.add("c", [51], max_tokens=1)
    assert replica.step().dropped == ["b/0"]
    for name in "xyc":
        replica.abort(name)
    replica.pool.clear_cache()
    replica.is_cache_cleared = True
    replica.add("d", prompt(5) + replica.output("b")[:3], max_tokens=1)
    plan = replica.step()
    assert started(plan) == ["d/0", "b/0"]
    assert plan.new[1].num_computed_tokens == 8
    assert started(replica.step()) == ["b/1"]
    replica.run()
    replica.check_outputs()
