"""What the scheduler plans, step by step, and how every sequence ends."""

from collections.abc import Collection

import pytest
from fakes import Failure, Replica, generate, hash_root

from pagoda.worker.errors import IntegrityError
from pagoda.worker.types import FinishReason, Request, RequestId, SamplingParams, SchedulerOutput, SequenceId


def started(plan: SchedulerOutput) -> list[str]:
    return [new.sequence_id for new in plan.new]


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    """Tokens of which no two are alike, nor like those of a prompt with another `first` far enough away."""
    return list(range(first, first + num_tokens))


def greedy(tokens: list[int], num_tokens: int, vocab_size: int = 64) -> list[int]:
    """What a greedy request gets."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return generate(tokens, sampling, 0, max_model_len=10_000, vocab_size=vocab_size)[0]


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


# -- waiting for what another one computes --------------------------------------------------------


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


# -- samples -----------------------------------------------------------------------------------


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


# -- admission and preemption -------------------------------------------------------------------


def test_admission_is_by_whole_need() -> None:
    """The first chunk would fit, the whole prompt does not: it waits, and nobody behind it passes."""
    replica = Replica(num_blocks=8, max_num_batched_tokens=32)
    replica.add("a", prompt(20), max_tokens=4)
    replica.add("b", prompt(16, first=30), max_tokens=4)
    replica.add("c", prompt(4, first=50), max_tokens=4)
    assert [started(replica.step()) for _ in range(4)] == [["a/0"], [], [], []]
    assert started(replica.step()) == ["b/0", "c/0"]
    replica.run()
    assert replica.stats.num_preemptions == 0


def test_hits_that_nobody_holds_count_as_needed() -> None:
    """Free cached blocks are no room for the rest of the request that hits them."""
    replica = Replica(num_blocks=8)
    replica.add("a", prompt(16), max_tokens=1)
    replica.run()
    replica.add("b", prompt(16, first=30), max_tokens=2)
    replica.step()
    replica.add("c", prompt(20), max_tokens=1)
    assert started(replica.step()) == []
    replica.run()
    replica.check_outputs()


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [((0, 0, 0), "c/0"), ((0, 1, 0), "b/0"), ((2, 1, 0), "a/0"), ((1, 1, 0), "b/0")],
)
def test_decoding_preempts_the_last(priorities: tuple[int, ...], victim: str) -> None:
    """Who goes last by priority, then arrival, makes room; and a step that preempts admits nobody."""
    replica = Replica(num_blocks=6)
    for first, (name, priority) in enumerate(zip("abc", priorities, strict=True)):
        replica.add(name, prompt(7, first=10 * first), priority=priority, max_tokens=12)
    replica.step()
    replica.step()
    replica.add("d", [60], priority=3, max_tokens=1)
    plan = replica.step()
    assert plan.dropped == [victim]
    assert started(plan) == []
    assert victim not in plan.num_scheduled_tokens
    assert replica.stats.num_preempted_tokens == 8
    replica.run()
    replica.check_outputs()


def test_sequence_may_preempt_itself() -> None:
    """The last in order finds no block for its own next token: it goes, the one before it stays."""
    replica = Replica(num_blocks=3)
    replica.add("a", prompt(6), max_tokens=6)
    replica.add("b", prompt(4, first=20), max_tokens=6)
    assert replica.step().num_scheduled_tokens == {"a/0": 6, "b/0": 4}
    plan = replica.step()
    assert (plan.dropped, plan.num_scheduled_tokens) == (["b/0"], {"a/0": 1})
    replica.run()
    replica.check_outputs()


def test_preempted_sequence_goes_on_where_it_was() -> None:
    """It comes back with prompt and output, hits what is still cached, and gets no token twice."""
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(6), priority=1, max_tokens=8)
    for _ in range(4):
        replica.step()
    replica.add("b", prompt(4, first=40), max_tokens=1)
    assert replica.step().dropped == ["a/0"]
    replica.step()
    plan = replica.step()
    new = plan.new[0]
    assert (new.sequence_id, new.num_output_tokens, new.num_computed_tokens) == ("a/0", 4, 8)
    assert new.token_ids == (*prompt(6), *replica.output("a")[:4])
    replica.run()
    assert replica.output("a") == greedy(prompt(6), 8)
    assert replica.end("a").num_cached_tokens == 0, "what its own first run cached is no saving"


@pytest.mark.parametrize("full", ["slots", "blocks"])
def test_urgent_request_takes_the_place_of_the_last(full: str) -> None:
    replica = Replica(num_blocks=6, max_num_seqs=2 if full == "slots" else 8)
    replica.add("a", prompt(9), priority=1, max_tokens=3)
    replica.add("b", prompt(9, first=20), priority=1, max_tokens=3)
    replica.step()
    replica.add("c", prompt(9, first=40), priority=0, max_tokens=3)
    assert replica.step().dropped == ["b/0"]
    assert started(replica.step()) == ["c/0"]
    replica.run()
    replica.check_outputs()


def test_urgent_request_preempts_nobody_if_there_is_room() -> None:
    replica = Replica()
    replica.add("a", prompt(9), priority=1)
    replica.step()
    replica.add("b", prompt(9, first=20), priority=0)
    assert started(replica.step()) == ["b/0"]
    replica.run()
    assert replica.stats.num_preemptions == 0


def test_earlier_arrival_does_not_preempt() -> None:
    """b passed a's second sample, which had to wait for the first one's prompt, and keeps the slot that it got."""
    replica = Replica(max_num_seqs=2)
    replica.add("a", prompt(3), n=2, max_tokens=9)
    replica.add("b", prompt(3, first=20), max_tokens=3)
    assert started(replica.step()) == ["a/0", "b/0"]
    replica.run()
    assert replica.stats.num_preemptions == 0


def test_nobody_is_preempted_for_one_that_would_wait() -> None:
    """The second sample of an urgent request waits for its first one's prompt: until then the others keep running.

    Preempting for it at once took a's slot for as long as the prompt took, and gave it back in its last step.
    """
    replica = Replica(max_num_seqs=2, max_num_batched_tokens=5)
    replica.add("a", prompt(3), priority=1, max_tokens=30)
    replica.step()
    replica.add("b", prompt(18, first=20), n=2, priority=0, max_tokens=3)
    plans = [replica.step() for _ in range(5)]
    assert all("a/0" in plan.num_scheduled_tokens for plan in plans)
    assert replica.step().dropped == ["a/0"]
    assert started(replica.step()) == ["b/1"]
    replica.run()
    assert replica.stats.num_preemptions == 1


def test_urgent_sample_needs_no_more_than_its_copy() -> None:
    """Without prefix caching too, a further sample shares the prompt: one free block is all it needs."""
    replica = Replica(num_blocks=7, enable_prefix_caching=False)
    replica.add("a", prompt(7), priority=1, max_tokens=2)
    replica.add("b", prompt(14, first=20), n=2, priority=0, max_tokens=2)
    assert started(replica.step()) == ["b/0", "a/0"]
    assert started(replica.step()) == ["b/1"]
    replica.run()
    assert replica.stats.num_preemptions == 0


def test_big_request_is_not_starved_by_small_ones() -> None:
    """One that needs the whole pool waits while small ones come in every step; they do not pass it for ever."""
    replica = Replica(num_blocks=8)
    replica.add("small", [1], max_tokens=4)
    replica.step()
    replica.add("big", prompt(31), max_tokens=1)
    for step in range(8):
        replica.add(f"small{step}", [step], max_tokens=4)
        replica.step()
    assert replica.end("big").finish_reason is FinishReason.LENGTH


def test_all_end_when_the_pool_is_far_too_small() -> None:
    """Eight requests that need 6 blocks each share a pool of 6: the first in order always gets on."""
    replica = Replica(num_blocks=6)
    for first in range(8):
        replica.add(str(first), prompt(5, first=5 * first), max_tokens=19)
    replica.run(max_steps=8 * 24)
    assert replica.stats.num_preemptions > 0
    replica.check_outputs()


def test_pool_at_its_limit() -> None:
    """Every block is held, at the context length; nothing is preempted, and nobody gets anybody's tokens."""
    replica = Replica(num_blocks=8, max_model_len=16)
    for first, name in enumerate("ab"):
        replica.add(name, prompt(13, first=20 * first), max_tokens=None)
    replica.step()
    assert replica.pool.num_free == 0
    replica.run()
    assert replica.stats.num_preemptions == 0
    replica.check_outputs()


# -- failed steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["before it began", "half-way"])
def test_failed_step_withdraws_what_it_published(failure: Failure) -> None:
    """The first chunk succeeded and stays cached; the second failed and must not be found."""
    replica = Replica(max_num_batched_tokens=8)
    replica.add("a", prompt(16))
    replica.step()
    replica.step(failure)
    assert replica.end("a").finish_reason is FinishReason.ERROR
    assert failure in replica.end("a").error
    replica.add("b", prompt(16))
    assert replica.step().new[0].num_computed_tokens == 8
    replica.run()
    replica.check_outputs()


def test_failed_step_ends_those_who_hit_what_it_published() -> None:
    """b started with a hit on the blocks that a computed in the same step."""
    replica = Replica()
    replica.add("a", prompt(16))
    replica.add("b", prompt(16))
    replica.step("half-way")
    assert {name: end.finish_reason for name, end in replica.ends.items()} == dict.fromkeys(
        ["a/0", "b/0"], FinishReason.ERROR
    )
    assert replica.pool.num_cached == 0


def test_failed_step_spares_those_who_wait() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(9))
    replica.add("b", prompt(9))
    replica.step("half-way")
    replica.run()
    assert replica.end("a").finish_reason is FinishReason.ERROR
    assert replica.output("b") == greedy(prompt(9), 16)


def test_what_a_failed_step_should_have_dropped_is_dropped_later() -> None:
    """The plan never reached the rank, which still holds a when it comes back from preemption, and b after its end."""
    replica = Replica(max_num_seqs=2)
    replica.add("a", prompt(3), priority=1)
    replica.add("b", prompt(3, first=20), priority=0, max_tokens=2)
    replica.step()
    replica.step()
    replica.add("c", prompt(3, first=40), priority=0)
    replica.add("d", prompt(3, first=50), priority=0)
    replica.step()
    assert replica.step("before it began").dropped == ["a/0"]
    replica.run()
    replica.check_outputs()


# -- ends --------------------------------------------------------------------------------------

ENDING_PROMPT = prompt(6)
ENDING_TOKENS = greedy(ENDING_PROMPT, 12, vocab_size=1000)


@pytest.mark.parametrize(
    ("sampling", "eos_token_ids", "num_tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 5}, (), 5, FinishReason.LENGTH, None),
        ({"max_tokens": 1}, (), 1, FinishReason.LENGTH, None),
        ({"max_tokens": None}, (), 10, FinishReason.LENGTH, None),
        ({"max_tokens": 100}, (), 10, FinishReason.LENGTH, None),
        ({}, (3,), 4, FinishReason.STOP, None),
        ({}, (0,), 1, FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 7}, (3,), 7, FinishReason.LENGTH, None),
        ({"min_tokens": 3}, (1, 3), 4, FinishReason.STOP, None),
        ({"min_tokens": 4, "max_tokens": 7}, (3,), 7, FinishReason.LENGTH, None),
        ({"stop_token_ids": (2,)}, (), 3, FinishReason.STOP, 2),
        ({"stop_token_ids": (2,), "min_tokens": 3, "max_tokens": 7}, (), 7, FinishReason.LENGTH, None),
        ({"stop_token_ids": (2,), "ignore_eos": True}, (2,), 3, FinishReason.STOP, 2),
        ({"max_tokens": 4}, (3,), 4, FinishReason.STOP, None),
    ],
)
def test_ends(
    sampling: dict[str, object],
    eos_token_ids: Collection[int],
    num_tokens: int,
    reason: FinishReason,
    stop_reason: int | None,
) -> None:
    """Token ids stand for the token that comes at that place of the output; the context length is 16."""
    assert len(set(ENDING_TOKENS)) == len(ENDING_TOKENS)
    if "stop_token_ids" in sampling:
        sampling = sampling | {"stop_token_ids": tuple(ENDING_TOKENS[place] for place in sampling["stop_token_ids"])}
    replica = Replica(
        max_model_len=16, vocab_size=1000, eos_token_ids={ENDING_TOKENS[place] for place in eos_token_ids}
    )
    replica.add("a", ENDING_PROMPT, **sampling)
    replica.run()
    assert replica.output("a") == ENDING_TOKENS[:num_tokens]
    assert replica.end("a").finish_reason is reason
    assert replica.end("a").stop_reason == (None if stop_reason is None else ENDING_TOKENS[stop_reason])
    replica.check_outputs()


def test_abort_while_waiting() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(3), max_tokens=2)
    replica.add("b", prompt(3, first=20))
    replica.step()
    assert len(replica.abort("b")) == 1
    replica.run()
    assert replica.output("b") == []
    assert replica.end("a").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_abort_frees_everything(num_steps: int) -> None:
    """Before its first step, between two chunks, after the prompt, while decoding: the blocks come back at once."""
    replica = Replica(max_num_batched_tokens=4)
    replica.add("a", prompt(9))
    for _ in range(num_steps):
        replica.step()
    assert len(replica.abort("a")) == 1
    assert not replica.scheduler.has_work()
    assert replica.pool.num_free == replica.pool.num_blocks
    replica.check()
    replica.run()


def test_abort_while_preempted() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", prompt(3), priority=1)
    replica.step()
    replica.add("b", prompt(3, first=20), max_tokens=1)
    assert replica.step().dropped == ["a/0"]
    assert len(replica.abort("a")) == 1
    replica.run()


def test_abort_ends_every_sample() -> None:
    """One has ended, one runs, two wait: three get their last output."""
    replica = Replica(max_num_seqs=2, vocab_size=1000)
    replica.add("a", prompt(3), n=4, temperature=1.0, seed=3, max_tokens=3)
    for _ in range(3):
        replica.step()
    assert sorted(output.index for output in replica.abort("a")) == [1, 2, 3]
    replica.run()
    assert [replica.end("a", index).finish_reason for index in range(4)] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.ABORT,
        FinishReason.ABORT,
    ]


def test_sample_that_its_reader_found_whole() -> None:
    """It ends as stopped, alone; its blocks are free at once and stay in the cache."""
    replica = Replica(vocab_size=1000, num_blocks=64)
    replica.add("a", prompt(9), n=2, temperature=1.0, seed=3, max_tokens=30)
    for _ in range(20):
        replica.step()
    num_held = replica.pool.num_blocks - replica.pool.num_free
    (end,) = replica.scheduler.abort(RequestId("a"), 1, FinishReason.STOP)
    assert (end.index, end.finish_reason, end.stop_reason) == (1, FinishReason.STOP, None)
    assert replica.pool.num_blocks - replica.pool.num_free < num_held
    assert replica.scheduler.abort(RequestId("a"), 1, FinishReason.STOP) == []
    replica.scheduler.check_integrity()
    assert len(replica.abort("a")) == 1
    assert replica.pool.num_free == replica.pool.num_blocks
    written = (*prompt(9), *replica.output("a", 1))
    replica.add("next turn", written, max_tokens=1)
    replica.step()
    num_computed = len(written) - 1  # the last token was sampled, but never put through the model
    assert replica.stats.num_hit_tokens == num_computed - num_computed % replica.manager.block_size


def test_late_and_unknown_aborts_are_ignored() -> None:
    replica = Replica()
    replica.add("a", prompt(3), max_tokens=1)
    replica.add("b", prompt(3, first=20))
    replica.run()
    for name in ("a", "b", "never seen"):
        assert replica.abort(name) == []


def test_id_can_be_used_again() -> None:
    """Table entries that the ended sequence still had to get must not reach the new one of the same name.

    a and b write equal blocks in one step: b's is replaced by a's, which its rank would hear in the next plan; but b
    has just ended.
    """
    replica = Replica()
    for name in "ab":
        replica.add(name, prompt(8), max_tokens=5)
    while replica.scheduler.has_work():
        replica.step()
    replica.add("b", prompt(12, first=30), max_tokens=5)
    assert replica.step().block_updates == []
    replica.run()
    replica.check_outputs()


def test_id_in_use_is_refused() -> None:
    replica = Replica()
    replica.add("a", prompt(3))
    with pytest.raises(IntegrityError, match="a is here already"):
        replica.scheduler.add(Request(RequestId("a"), (1,), SamplingParams()), seed=0, hash_root=hash_root(b""))


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


def test_many_aborted_while_waiting_do_not_pile_up() -> None:
    """Waiting sequences that were aborted leave the queue as others come, though none of them reached its front."""
    replica = Replica(max_num_seqs=1)
    replica.add("running", prompt(3), max_tokens=None)
    replica.step()
    replica.add("first", prompt(3), max_tokens=1)
    for index in range(500):
        replica.add(f"late{index}", prompt(3), max_tokens=1)
        replica.abort(f"late{index}")
    assert replica.stats.num_waiting == 1
    assert len(replica.scheduler._waiting) < 100
    replica.check()


def test_lost_sequence_is_an_integrity_error() -> None:
    """A sequence that is in no queue would never end; the check finds it."""
    replica = Replica()
    replica.add("a", prompt(3))
    replica.step()
    replica.scheduler._running.clear()
    with pytest.raises(IntegrityError):
        replica.scheduler.check_integrity()


# -- log probabilities -------------------------------------------------------------------------


def test_prompt_logprobs_come_with_each_chunk() -> None:
    """Four tokens a step: the first step tells of tokens 1 to 4, since each is told of by the one before it."""
    replica = Replica(max_num_batched_tokens=4)
    replica.add("a", prompt(10), max_tokens=2, prompt_logprobs=0)
    counts = []
    for _ in range(4):
        replica.step()
        counts.append(len(replica.logprobs["a/0"]))
    assert counts == [4, 8, 9, 9]
    replica.check_outputs()


def test_prompt_logprobs_take_no_hits_and_leave_nothing() -> None:
    """A token found in the cache is not computed, so nothing could tell its log probability."""
    replica = Replica()
    replica.add("a", prompt(10), max_tokens=2)
    replica.run()
    num_cached = replica.pool.num_cached
    replica.add("b", prompt(10), max_tokens=2, prompt_logprobs=0)
    replica.run()
    assert replica.end("b").num_cached_tokens == 0
    assert replica.pool.num_cached == num_cached
    replica.check_outputs()


def test_prompt_logprobs_are_told_once_though_the_prompt_is_computed_twice() -> None:
    """Preempted between two chunks and while it decodes: what was told before is not told again."""
    for num_steps in (1, 3):
        replica = Replica(num_blocks=4, max_num_batched_tokens=4)
        replica.add("a", prompt(10), priority=1, max_tokens=4, prompt_logprobs=0, logprobs=0)
        for _ in range(num_steps):
            replica.step()
        replica.add("b", prompt(10, first=30), priority=0, max_tokens=2)
        replica.run()
        assert replica.stats.num_preemptions == 1
        replica.check_outputs()
        assert len(replica.logprobs["a/0"]) == 9 + 4


def test_prompt_logprobs_come_with_the_first_sample_only() -> None:
    replica = Replica(max_num_batched_tokens=4)
    replica.add("a", prompt(10), n=3, temperature=1.0, max_tokens=4, prompt_logprobs=0)
    replica.run()
    assert [len(replica.logprobs[SequenceId(f"a/{index}")]) for index in range(3)] == [9, 0, 0]
    replica.check_outputs()


def test_logprobs_of_the_last_token_come_with_it() -> None:
    """A sequence that ends by a token tells that token's too."""
    replica = Replica()
    replica.add("a", [1], max_tokens=1, logprobs=0, prompt_logprobs=0)
    replica.run()
    assert len(replica.end("a").logprobs) == 1
    assert replica.end("a").prompt_logprobs == ()
    replica.check_outputs()
