"""What a sequence finds in the cache as it starts, and what the running ones compute for it."""

import pytest
from fakes import Replica
from scheduling import greedy, prompt, started

# -- prefix cache ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 512, 128, 100])
def test_64_simultaneous_requests_compute_their_prefix_once(max_num_batched_tokens: int) -> None:
    """500 tokens in common, 31 full blocks of 16; each has 3 of its own. Budgets above and below the prefix."""
    replica = Replica(
        num_blocks=256, block_size=16, max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens, vocab_size=2000
    )
    for index in range(64):
        replica.add(str(index), [*prompt(500), *[1000 + index] * 3], max_tokens=1)
    replica.run()
    assert replica.stats.num_computed_tokens == 503 + 63 * (503 - 31 * 16)
    assert replica.stats.num_cached_tokens == 63 * 31 * 16


def test_full_hit_leaves_one_token_to_compute() -> None:
    """Its logits are needed, its KV is there already: it lies in a shared block, which nobody writes again."""
    replica = Replica()
    replica.add("a", prompt(8), max_tokens=1)
    replica.run()
    replica.add("b", prompt(8), max_tokens=2)
    plan = replica.step()
    assert (plan.new[0].num_computed_tokens, plan.new[0].num_shared_tokens) == (7, 8)
    assert plan.num_scheduled_tokens == {"b/0": 1}
    replica.run()
    assert replica.output("b") == greedy(prompt(8), 2)
    assert replica.end("b").num_cached_tokens == 7


@pytest.mark.parametrize(("num_common", "num_cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8)])
def test_hit_is_whole_blocks(num_common: int, num_cached: int) -> None:
    replica = Replica()
    replica.add("a", prompt(12))
    replica.run()
    replica.add("b", prompt(num_common) + prompt(12 - num_common, first=40))
    plan = replica.step()
    assert plan.new[0].num_computed_tokens == plan.new[0].num_shared_tokens == num_cached


def test_output_is_reused_too() -> None:
    """A second turn, whose prompt is the first one's prompt and answer, computes only what the first did not."""
    replica = Replica()
    replica.add("a", prompt(6), max_tokens=7)
    replica.run()
    replica.add("b", prompt(6) + replica.output("a") + prompt(3))
    assert replica.step().new[0].num_computed_tokens == 12


def test_public_blocks_are_shared_and_what_follows_is_not() -> None:
    """Two tenants begin with a prefix of one and a half blocks that is declared public: the first block is a hit."""
    replica = Replica()
    replica.add("a", prompt(12), salt=b"one", num_public_tokens=6)
    replica.run()
    for name, salt, num_cached in (("b", b"two", 4), ("c", b"one", 11), ("d", b"", 4)):
        replica.add(name, prompt(12), salt=salt, num_public_tokens=6)
        replica.run()
        assert replica.end(name).num_cached_tokens == num_cached, name


def test_salts_and_private_requests_share_nothing() -> None:
    """Equal prompts under another salt, or kept out of the cache, hit nothing, at once or later."""
    replica = Replica()
    replica.add("a", prompt(8), salt=b"one")
    replica.add("b", prompt(8), salt=b"two")
    replica.add("c", prompt(8), salt=None)
    replica.run()
    replica.add("d", prompt(8), salt=None)
    replica.add("e", prompt(8), salt=b"three")
    replica.run()
    assert replica.stats.num_cached_tokens == 0


def test_private_request_with_full_blocks_runs() -> None:
    """A request kept out of the cache has no hashes to publish its full blocks under."""
    replica = Replica()
    replica.add("a", prompt(6), salt=None, max_tokens=8)
    replica.run()
    assert replica.output("a") == greedy(prompt(6), 8)
    assert replica.pool.num_cached == 0


def test_without_prefix_caching_nothing_is_reused() -> None:
    replica = Replica(enable_prefix_caching=False)
    for name in "ab":
        replica.add(name, prompt(9), max_tokens=4)
        replica.run()
    assert replica.output("a") == replica.output("b")
    assert (replica.stats.num_cached_tokens, replica.pool.num_cached) == (0, 0)


def test_recomputed_block_is_replaced_by_the_cached_one() -> None:
    """Two greedy requests with one prompt write equal output blocks; the later one then holds the earlier's."""
    replica = Replica()
    for name in "ab":
        replica.add(name, prompt(8), max_tokens=6)
    tables = {new.sequence_id: list(new.block_tables[0]) for new in replica.step().new}
    updates = [update for _ in range(5) for update in replica.step().block_updates]
    for sequence_id, _, index, block_id in updates:
        tables[sequence_id][index : index + 1] = [block_id]
    assert tables["a/0"][:3] == tables["b/0"][:3]
    assert tables["a/0"][3] != tables["b/0"][3], "these are still written"


def test_eviction_takes_a_chains_tail_first() -> None:
    """A prompt of 8 blocks is cached and free; a request of 3 blocks leaves 5 of them to hit."""
    replica = Replica(num_blocks=8)
    replica.add("a", prompt(32)[:31], max_tokens=1)
    replica.run()
    assert replica.pool.num_cached == 7
    replica.add("b", prompt(12, first=40), max_tokens=1)
    replica.run()
    replica.add("c", prompt(31), max_tokens=1)
    assert replica.step().new[0].num_computed_tokens == 20


# -- waiting for what another one computes -----------------------------------------------------


def test_waiter_starts_in_the_step_that_computes_its_prefix() -> None:
    """The prefix takes 3 steps; the waiter starts in the third, with what that step computes as a hit."""
    replica = Replica(max_num_batched_tokens=16)
    replica.add("a", prompt(40))
    replica.add("b", [*prompt(40), 63])
    assert [started(replica.step()) for _ in range(3)] == [["a/0"], [], ["b/0"]]
    replica.run()
    assert replica.stats.num_computed_tokens == 40 + 1 + 2 * 15


def make_slow_owner() -> Replica:
    """Three that decode, and a, whose prompt gets the one token a step that they leave; all slots are taken."""
    replica = Replica(max_num_seqs=4, max_num_batched_tokens=4)
    for first, name in enumerate("xyz"):
        replica.add(name, prompt(1, first=first), priority=1, max_tokens=40)
    replica.step()
    replica.add("a", prompt(16, first=10), priority=1, max_tokens=40)
    replica.step()
    return replica


def test_waiter_goes_on_when_the_owner_is_aborted() -> None:
    """What the owner has computed is hit; the waiter computes the rest."""
    replica = make_slow_owner()
    for _ in range(3):
        replica.step()
    replica.add("b", prompt(17, first=10), priority=0)
    assert started(replica.step()) == []
    replica.abort("a")
    plan = replica.step()
    assert started(plan) == ["b/0"]
    assert plan.new[0].num_computed_tokens == 4
