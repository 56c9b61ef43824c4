"""A worker that lies is found out."""

from dataclasses import replace
from typing import Any

import pytest
from ascii_service import FakeWorkerClient, service

from pagoda.cluster.ingress.output_check import OutputCheck
from pagoda.worker.config import EngineLimits
from pagoda.worker.types import FinishReason, Request, RequestId, SamplingParams, SequenceOutput, TokenLogprobs

LIMITS = EngineLimits(max_model_len=20, vocab_size=100, max_num_seqs=4, max_num_waiting=4)
GOOD = SequenceOutput(RequestId("r"), 0, (1, 2))
ENTRY = TokenLogprobs(1, -1.0, 1, ((1, -1.0),))


def check(**sampling: Any) -> OutputCheck:
    request = Request(RequestId("r"), (1,) * 10, SamplingParams(**({"max_tokens": 5, "n": 2} | sampling)))
    return OutputCheck(request, LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 2},
        {"index": -1},
        {"token_ids": (100,)},
        {"token_ids": (1, -1)},
        {"token_ids": (1,) * 6},
        {"num_cached_tokens": 11},
        {"num_cached_tokens": -1},
        {"prompt_logprobs": (ENTRY,) * 10},
        {"prompt_logprobs": (replace(ENTRY, token_id=100),)},
        {"logprobs": (replace(ENTRY, top=((2**31, -1.0),)),)},
        {"logprobs": (replace(ENTRY, logprob=float("nan")),)},
        {"logprobs": (replace(ENTRY, top=((1, 7.0),)),)},
    ],
)
def test_lies_are_errors(changes: dict[str, Any]) -> None:
    problem = check().problem_with(replace(GOOD, **changes))
    assert problem is not None
    assert problem.startswith("a worker ")


def test_what_a_worker_may_send() -> None:
    one = check(logprobs=1, prompt_logprobs=1)
    assert one.problem_with(replace(GOOD, token_ids=(), prompt_logprobs=(ENTRY,) * 9)) is None
    assert one.problem_with(replace(GOOD, logprobs=(ENTRY, ENTRY), num_cached_tokens=10)) is None
    assert (
        one.problem_with(replace(GOOD, token_ids=(99, 0, 3), logprobs=(ENTRY,) * 3, finish_reason=FinishReason.LENGTH))
        is None
    )
    assert one.problem_with(replace(GOOD, index=1, token_ids=(), finish_reason=FinishReason.ABORT)) is None


def test_tokens_are_counted_over_all_outputs_of_a_sample() -> None:
    """A worker that never ends a sample would otherwise hold its client, and fill its memory, for ever."""
    one = check()
    assert one.problem_with(GOOD) is None
    assert one.problem_with(GOOD) is None
    assert one.problem_with(replace(GOOD, index=1)) is None
    assert "more than 5 tokens" in str(one.problem_with(GOOD))
    unlimited = check(max_tokens=None)
    for _ in range(5):
        assert unlimited.problem_with(GOOD) is None
    assert "more than 10 tokens" in str(unlimited.problem_with(GOOD))


def test_log_probabilities_that_are_missing() -> None:
    assert "without their log probabilities" in str(check(logprobs=0).problem_with(GOOD))


async def test_a_second_end_is_ignored() -> None:
    end = SequenceOutput(RequestId("r"), 0, (ord("a"),), finish_reason=FinishReason.LENGTH)
    client = FakeWorkerClient([end, replace(end, token_ids=(ord("b"),))])
    generation = service(client).generate([1], SamplingParams(max_tokens=2))
    batches = [batch async for batch in generation.outputs]
    assert [output.text for batch in batches for output in batch] == ["a"]
