"""What is kept of a request whose worker is lost, and which requests are not given to yet another worker."""

import pytest

from pagoda.cluster.ingress.progress import (
    MAX_DEATHS,
    MAX_DEATHS_TOGETHER,
    PoisonousRequestError,
    RequestProgress,
)
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import EngineStoppedError, OverloadedError
from pagoda.worker.types import (
    FinishReason,
    Request,
    RequestId,
    SampleProgress,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    is_attempt_of,
)

ID = RequestId("r")
LIMITS = EngineLimits(max_model_len=200, vocab_size=300, max_num_seqs=4, max_num_waiting=4)
DEATH = EngineStoppedError("the worker is gone")
ENTRY = TokenLogprobs(1, -0.5, 1, ())


def progress(n: int = 1) -> RequestProgress:
    return RequestProgress(Request(ID, (1, 2, 3), SamplingParams(n=n, seed=5, max_tokens=100)), LIMITS)


def output(*token_ids: int, index: int = 0, end: FinishReason | None = None, num_cached: int = 0) -> SequenceOutput:
    return SequenceOutput(ID, index, token_ids, finish_reason=end, num_cached_tokens=num_cached)


def test_first_attempt_has_a_name_of_its_own() -> None:
    found = progress().attempt()
    assert (found.request_id, found.progress, found.runs_alone) == ("r~0", (), False)


def test_what_has_come_goes_with_the_next_attempt() -> None:
    """Apart from the prompt, and under another name: what the lost worker still says is of no one."""
    it = progress(n=3)
    it.attempt()
    it.take([output(7), output(8, index=1)])
    it.take([output(9), output(4, index=1, end=FinishReason.STOP)])
    it.lose_worker(DEATH)
    found = it.attempt()
    assert found.prompt_token_ids == (1, 2, 3)
    assert found.sampling.seed == 5
    assert found.progress == (SampleProgress((7, 9)), SampleProgress((8, 4), has_ended=True), SampleProgress())
    assert found.live_samples == (0, 2)
    assert found.request_id != "r"
    assert is_attempt_of(found.request_id, ID)


def test_what_its_first_worker_does_not_keep_is_new_again() -> None:
    """It was taken and shed, before anything was done for it: so it may be refused. Not so what was begun before."""
    it = progress()
    it.attempt()
    it.accept()
    it.refuse(OverloadedError("shed"))
    assert not it.is_accepted
    assert it.attempt().progress == ()
    it.take([output(7)])
    it.lose_worker(DEATH)
    it.attempt()
    it.accept()
    it.refuse(OverloadedError("full"))
    assert it.is_accepted


def test_who_ends_an_attempt_does_not_end_the_next_one() -> None:
    """Scenario: an ingress has all workers end what it has lost, and one of them has begun with the next attempt."""
    it = progress()
    first, second = it.attempt(), it.attempt()
    assert not is_attempt_of(second.request_id, first.request_id)


def test_ends_when_all_samples_have_ended() -> None:
    it = progress(n=2)
    it.take([output(7, end=FinishReason.LENGTH)])
    assert not it.has_ended
    it.complete_sample(1)
    assert it.has_ended


def test_told_prompt_logprobs_are_counted() -> None:
    it = progress()
    it.attempt()
    it.take([SequenceOutput(ID, 0, (), prompt_logprobs=(ENTRY, ENTRY))])
    it.lose_worker(DEATH)
    assert it.attempt().num_told_prompt_logprobs == 2


def test_cached_tokens_are_those_of_the_first_worker() -> None:
    """The second one computes them anew; the client's usage does not change in mid-stream."""
    it = progress()
    it.take([output(7, num_cached=2)])
    it.lose_worker(DEATH)
    later = output(8, num_cached=0)
    it.take([later])
    assert later.num_cached_tokens == 2


def test_accepted_once_is_accepted_everywhere() -> None:
    """Its queue may be full: what the cluster has taken on, it does not refuse."""
    it = progress()
    it.attempt()
    it.accept()
    it.lose_worker(DEATH)
    assert it.is_accepted
    assert it.attempt().progress == (SampleProgress(),)


def test_present_at_two_deaths_runs_alone_then_is_refused() -> None:
    it = progress()
    for _ in range(MAX_DEATHS_TOGETHER):
        assert not it.attempt().runs_alone
        it.accept()
        it.lose_worker(DEATH)
    assert it.attempt().runs_alone
    it.accept()
    with pytest.raises(PoisonousRequestError, match=r"3 workers failed .* the worker is gone"):
        it.lose_worker(DEATH)


def test_one_that_gets_further_is_not_to_blame() -> None:
    """A request that kills its workers does so at the same token each time."""
    it = progress()
    for number in range(MAX_DEATHS_TOGETHER * 3):
        assert not it.attempt().runs_alone
        it.take([output(number)])
        it.lose_worker(DEATH)


def test_what_a_worker_cannot_have_computed_is_not_believed() -> None:
    """What came before it in the same message is."""
    it = progress()
    it.attempt()
    good = output(7)
    assert it.take([good, output(10**6)]) == [good]
    assert "token 1000000" in str(it.failure)
    it.lose_worker(DEATH)
    assert it.attempt().progress == (SampleProgress((7,)),)
    assert it.take([output(8)])
    assert it.failure is None


def test_but_not_for_ever() -> None:
    it = progress()
    for number in range(MAX_DEATHS):
        it.attempt()
        it.take([output(number)])
        it.lose_worker(DEATH)
    it.attempt()
    it.take([output(0)])
    with pytest.raises(PoisonousRequestError):
        it.lose_worker(DEATH)


def test_worker_that_had_not_taken_it_was_not_killed_by_it() -> None:
    it = progress()
    for _ in range(10):
        assert not it.attempt().runs_alone
        it.lose_worker(DEATH)


@pytest.mark.parametrize(
    ("attempt", "expected"), [("r", True), ("r~1", True), ("r~12", True), ("r~x", False), ("r2", False), ("~1", False)]
)
def test_names_of_attempts(attempt: str, expected: bool) -> None:
    assert is_attempt_of(RequestId(attempt), ID) is expected
