"""How every sequence ends: by a failed step, a token, its length or an abort."""

from collections.abc import Collection

import pytest
from fakes import Failure, Replica, hash_chain
from scheduling import greedy, prompt

from pagoda.worker.errors import IntegrityError
from pagoda.worker.types import FinishReason, Request, RequestId, SamplingParams

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
        replica.scheduler.add(Request(RequestId("a"), (1,), SamplingParams()), seed=0, hash_chain=hash_chain(b""))


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
