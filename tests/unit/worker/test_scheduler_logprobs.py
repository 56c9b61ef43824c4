"""Log probabilities come once each, whatever happens to the prompt."""

from fakes import Replica
from scheduling import prompt

from pagoda.worker.types import SequenceId


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
