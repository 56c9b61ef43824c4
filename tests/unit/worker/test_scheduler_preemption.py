"""Who is admitted, who waits, and who has to give up its place."""

import pytest
from fakes import Replica
from scheduling import greedy, prompt, started

from pagoda.worker.types import FinishReason


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


def test_a_prompt_that_does_not_fit_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: a prompt of 100,000 tokens waits for blocks, and each step of those that run takes 8 ms longer.

    It starts as soon as somebody has given blocks back.
    """
    replica = Replica(num_blocks=16)
    replica.add("runs", range(8), max_tokens=30, ignore_eos=True)
    replica.step()
    replica.add("waits", range(100, 152), max_tokens=2)
    num_lookups = 0
    lookup = replica.manager.lookup

    def counted(sequence: object) -> object:
        nonlocal num_lookups
        num_lookups += 1
        return lookup(sequence)

    monkeypatch.setattr(replica.manager, "lookup", counted)
    for _ in range(28):
        replica.step()
    assert num_lookups <= 3
    replica.run()
    assert len(replica.output("waits")) == 2
    replica.check_outputs()
