"""Tokens of a worker's stream become text; whatever ends, ends what is below it."""

import asyncio
import threading
from typing import Any

import pytest
from ascii_service import LIMITS, AsciiTokenizer, FakeWorkerClient, logprobs, out, service

from pagoda.cluster.ingress.generation import GenerationFailedError, RequestAbortedError, TextOutput, prompt_only
from pagoda.cluster.ingress.live_requests import DrainingError
from pagoda.cluster.ingress.service import MAX_ASIDE, InferenceService
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import EngineStoppedError, InvalidRequestError, OverloadedError
from pagoda.worker.types import FinishReason, SamplingParams

DEADLINE_S = 10.0
STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


async def until_no_task_is_left() -> None:
    await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()})), DEADLINE_S)


async def pieces(client: FakeWorkerClient, **sampling: Any) -> list[TextOutput]:
    generation = service(client).generate([1] * 20, SamplingParams(**sampling))
    return [output async for batch in generation.outputs for output in batch]


async def texts(client: FakeWorkerClient, **sampling: Any) -> list[list[tuple[int, str, FinishReason | None]]]:
    generation = service(client).generate([1] * 20, SamplingParams(**sampling))
    return [[(o.index, o.text, o.finish_reason) for o in batch] async for batch in generation.outputs]


async def test_text_comes_batch_by_batch() -> None:
    client = FakeWorkerClient([out(0, "ab")], [out(0, "c")], [out(0, "d", LENGTH)])
    assert await texts(client) == [[(0, "ab", None)], [(0, "c", None)], [(0, "d", LENGTH)]]
    assert client.is_closed


async def test_counts_come_along() -> None:
    """Tokens count even where they show no text, as a stop token does not."""
    client = FakeWorkerClient([out(0, "a", cached=16)], [out(0, "$", STOP, cached=16)])
    assert await pieces(client) == [
        TextOutput(0, "a", (ord("a"),), None, 16, logprobs=logprobs("a")),
        TextOutput(0, "", (ord("$"),), STOP, 16, logprobs=logprobs("$")),
    ]


async def test_tokens_behind_a_stop_string_do_not_count() -> None:
    """The worker was ahead of the reader, so one output brings tokens that come after the stop string."""
    client = FakeWorkerClient([out(0, "a")], [out(0, "b.cd")], then_hangs=True)
    outputs = await pieces(client, stop=(".",))
    assert [(o.text, o.num_new_tokens) for o in outputs] == [("a", 1), ("b", 2)]
    assert [o.logprobs for o in outputs] == [logprobs("a"), logprobs("b.")]


async def test_stop_reason_is_the_string_or_token_that_ended_it() -> None:
    """An end of sequence or of the limit is none; a stop string in the tokens before a stop token comes first."""
    for output, expected in (
        (out(0, "a$", STOP, stop_reason=36), 36),
        (out(0, "a$", STOP), None),
        (out(0, "a$", LENGTH), None),
        (out(0, "a.b$", STOP, stop_reason=36), "."),
        (out(0, "a.b"), "."),
    ):
        (piece,) = await pieces(FakeWorkerClient([output]), stop=("!", "."))
        assert piece.stop_reason == expected


async def test_end_that_is_part_of_the_text() -> None:
    """On request the stop string or token shows; what comes behind a stop string still does not."""
    assert await texts(FakeWorkerClient([out(0, "ab.c")]), stop=(".",), include_stop_str_in_output=True) == [
        [(0, "ab.", STOP)]
    ]
    assert await texts(FakeWorkerClient([out(0, "ab$", STOP)]), include_stop_str_in_output=True) == [[(0, "ab$", STOP)]]


@pytest.mark.parametrize(("skips", "text"), [(True, "ab"), (False, "^ab")])
async def test_special_tokens_show_if_asked(skips: bool, text: str) -> None:
    client = FakeWorkerClient([out(0, "^ab", LENGTH)])
    assert await texts(client, skip_special_tokens=skips) == [[(0, text, LENGTH)]]


async def test_prompt_logprobs_come_before_the_text() -> None:
    client = FakeWorkerClient([out(0, "", prompt="xy")], [out(0, "a", LENGTH, prompt="z")])
    outputs = await pieces(client)
    assert [(o.text, o.prompt_logprobs) for o in outputs] == [("", logprobs("xy")), ("a", logprobs("z"))]


async def test_prompt_only_shows_nothing_but_the_end() -> None:
    """Of a prompt that is only asked about, one token is generated all the same."""
    client = FakeWorkerClient([out(0, "", prompt="xy")], [out(0, ".", STOP, stop_reason=46, prompt="z")])
    generation = prompt_only(service(client).generate([1] * 20, SamplingParams(max_tokens=1)))
    assert [o async for batch in generation.outputs for o in batch] == [
        TextOutput(0, "", (), None, 0, prompt_logprobs=logprobs("xy")),
        TextOutput(0, "", (), LENGTH, 0, prompt_logprobs=logprobs("z")),
    ]
    assert client.is_closed


async def test_request_reaches_the_worker() -> None:
    client = FakeWorkerClient([out(0, "a", LENGTH)])
    generation = service(client).generate([1, 2], SamplingParams(seed=5), priority=-3)
    assert not client.requests, "nothing happens before the outputs are read"
    async for _ in generation.outputs:
        pass
    assert client.requests == [generation.request]
    request = generation.request
    assert (request.prompt_token_ids, request.sampling.seed, request.priority) == ((1, 2), 5, -3)
    assert generation.num_prompt_tokens == 2


async def test_request_id_begins_as_given_and_is_never_used_twice() -> None:
    """A client that repeats a request while the first one still runs must not be refused for its id."""
    tested = service(FakeWorkerClient())
    ids = [tested.generate([1] * 20, SamplingParams(), request_id="abc").request.request_id for _ in range(2)]
    assert all(request_id.startswith("abc-") for request_id in ids)
    assert len({*ids, tested.generate([1] * 20, SamplingParams()).request.request_id}) == 3


async def test_stop_string_ends_one_sample_while_the_other_goes_on() -> None:
    """What the worker still brings for the first sample is dropped; the second one ends as the worker says."""
    client = FakeWorkerClient(
        [out(0, "aE"), out(1, "x")],
        [out(0, "ND"), out(1, "y")],
        [out(0, "junk"), out(1, "z")],
        [out(0, "junk", LENGTH), out(1, "!", LENGTH)],
    )
    assert await texts(client, n=2, stop=("END",)) == [
        [(0, "a", None), (1, "x", None)],
        [(0, "", STOP), (1, "y", None)],
        [(1, "z", None)],
        [(1, "!", LENGTH)],
    ]
    assert client.completed_samples == [0]
    await until_no_task_is_left()
    assert client.is_closed


async def test_batch_of_which_nothing_is_left_is_not_shown() -> None:
    client = FakeWorkerClient([out(0, "."), out(1, "x")], [out(0, "junk")], [out(1, "y", LENGTH)])
    assert await texts(client, n=2, stop=(".",)) == [[(0, "", STOP), (1, "x", None)], [(1, "y", LENGTH)]]


async def test_worker_ends_what_stop_strings_ended_while_nobody_waits() -> None:
    """Its call is left to return by itself: cancelled, the request would count as aborted."""
    client = FakeWorkerClient([out(0, "a."), out(1, "b")], [out(1, "c.")], [out(1, "junk", STOP)])
    assert await texts(client, n=2, stop=(".",)) == [[(0, "a", STOP), (1, "b", None)], [(1, "c", STOP)]]
    assert client.completed_samples == [0, 1]
    assert (client.num_given, client.is_closed) == (2, False)
    await until_no_task_is_left()
    assert (client.num_given, client.is_closed) == (3, True)


async def test_reader_that_leaves_at_the_stop_string_aborts_nothing() -> None:
    client = FakeWorkerClient([out(0, "a.")], [out(0, "junk", STOP)])
    outputs = service(client).generate([1] * 20, SamplingParams(stop=(".",))).outputs
    await anext(outputs)
    await outputs.aclose()
    assert not client.is_closed
    await until_no_task_is_left()
    assert client.num_given == 2


async def test_worker_that_does_not_end_what_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the stream aborts it in the end, so that its place is not lost."""
    monkeypatch.setattr("pagoda.cluster.ingress.service._END_GRACE_S", 0.001)
    client = FakeWorkerClient([out(0, "a.")], then_hangs=True)
    assert await texts(client, stop=(".",)) == [[(0, "a", STOP)]]
    await until_no_task_is_left()
    assert client.is_closed


async def test_worker_lost_before_it_ends_what_is_whole() -> None:
    """The client has its answer; nobody is left who could be told."""
    client = FakeWorkerClient([out(0, "a.")], then_fails=True)
    assert await texts(client, stop=(".",)) == [[(0, "a", STOP)]]
    await until_no_task_is_left()
    assert client.is_closed


async def test_stop_string_before_min_tokens_does_not_count() -> None:
    client = FakeWorkerClient([out(0, ".")], [out(0, "a")], [out(0, ".")], then_hangs=True)
    assert await texts(client, stop=(".",), min_tokens=2) == [[(0, ".", None)], [(0, "a", None)], [(0, "", STOP)]]


async def test_error_output_is_raised() -> None:
    """The step that computed the sequence failed: the client gets the reason, after the text that came before."""
    client = FakeWorkerClient([out(0, "a")], [out(0, "", ERROR, error="the step failed")], then_hangs=True)
    outputs = service(client).generate([1] * 20, SamplingParams()).outputs
    assert len(await anext(outputs)) == 1
    with pytest.raises(GenerationFailedError, match="the step failed"):
        await anext(outputs)
    assert client.is_closed


async def test_abort_by_the_worker_is_raised() -> None:
    """The worker shut down under the request."""
    client = FakeWorkerClient([out(0, "", ABORT)], then_hangs=True)
    with pytest.raises(EngineStoppedError):
        await texts(client)
    assert client.is_closed


async def test_worker_that_stops_is_not_somebody_who_aborts() -> None:
    """A client may try again elsewhere."""
    with pytest.raises(EngineStoppedError, match="the worker stopped") as error:
        await texts(FakeWorkerClient([out(0, "a")], [out(0, "", ABORT, error="the worker stopped")]))
    assert not isinstance(error.value, RequestAbortedError)


async def test_service_that_stops_is_not_somebody_who_aborts() -> None:
    tested = InferenceService(AsciiTokenizer(), client := FakeWorkerClient([out(0, "a")], [out(0, "", ABORT)]), LIMITS)  # type: ignore[arg-type]
    outputs = tested.generate([1] * 20, SamplingParams()).outputs
    await anext(outputs)
    client.abort = lambda _: None  # type: ignore[method-assign]
    draining = asyncio.create_task(tested.drain(0.0))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await anext(outputs)
    await draining


async def test_refusal_by_the_worker_is_raised() -> None:
    with pytest.raises(OverloadedError, match="busy"):
        await texts(FakeWorkerClient(error=OverloadedError("busy")))


async def test_reader_that_goes_away_closes_the_stream() -> None:
    """A client that disconnects cancels the task that reads; the worker must hear of it at once."""
    client = FakeWorkerClient([out(0, "a")], then_hangs=True)
    outputs = service(client).generate([1] * 20, SamplingParams()).outputs
    await anext(outputs)
    reading = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert client.is_closed


async def test_outputs_closed_between_two_batches() -> None:
    client = FakeWorkerClient([out(0, "a")], [out(0, "b")])
    outputs = service(client).generate([1] * 20, SamplingParams()).outputs
    await anext(outputs)
    await outputs.aclose()
    assert client.is_closed


# -- the service ---------------------------------------------------------------------------------


async def test_encoding_leaves_the_event_loop_free() -> None:
    """A long prompt takes the tokenizer a while, which must not stop every other stream."""
    tokenizer = AsciiTokenizer()
    tested = InferenceService(tokenizer, FakeWorkerClient(), LIMITS)  # type: ignore[arg-type]
    assert await tested.encode("ab") == [94, 97, 98]
    assert await tested.encode("ab", add_special_tokens=False) == [97, 98]
    assert tokenizer.encoding_thread is not threading.current_thread()
    assert await tested.encode_chat([{"content": "a"}, {"content": "b"}]) == [97, 98]
    assert await tested.encode_chat([{"content": "a"}], ChatOptions(add_special_tokens=True)) == [94, 97]
    assert await tested.decode([94, 97], skip_special_tokens=False) == "^a"
    for token_ids in ([-1], [97, LIMITS.vocab_size]):
        with pytest.raises(InvalidRequestError, match="tokens: token ids must be in"):
            await tested.decode(token_ids, skip_special_tokens=False)
    tested.close()


class HangingTokenizer(AsciiTokenizer):
    """Takes its time with texts that are no prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        if max_tokens is None:
            assert self.may_end.wait(DEADLINE_S)
        return super().encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


async def test_prompts_do_not_wait_for_other_texts() -> None:
    """Of which only so many wait."""
    tokenizer = HangingTokenizer()
    tested = InferenceService(tokenizer, FakeWorkerClient(), LIMITS)  # type: ignore[arg-type]
    others = [asyncio.create_task(tested.tokenize("a")) for _ in range(MAX_ASIDE)]
    try:
        assert await asyncio.wait_for(tested.encode("b"), DEADLINE_S) == [94, 98]
        with pytest.raises(OverloadedError):
            await tested.tokenize_chat([{"content": "a"}])
    finally:
        tokenizer.may_end.set()
    assert await asyncio.gather(*others) == [[94, 97]] * MAX_ASIDE
    assert await tested.tokenize("c") == [94, 99]


async def test_check_names_what_the_client_wrote() -> None:
    tested = service(FakeWorkerClient())
    with pytest.raises(InvalidRequestError) as error:
        tested.check([1] * 1000, SamplingParams(), names={"prompt": "messages"})
    assert error.value.field == "messages"
    with pytest.raises(InvalidRequestError) as error:
        tested.check([1], SamplingParams(max_tokens=1000), names={"prompt": "messages"})
    assert error.value.field == "max_tokens"


async def test_check_uses_the_engine_limits() -> None:
    """The ingress refuses what no worker could serve, before it sends anything."""
    tested = service(FakeWorkerClient())
    tested.check([1], SamplingParams(max_tokens=99))
    with pytest.raises(InvalidRequestError, match="max_tokens: 100 is too much"):
        tested.check([1], SamplingParams(max_tokens=100))


@pytest.mark.parametrize(("error", "expected"), [(None, True), (TimeoutError(), False), (OSError(), False)])
async def test_health_is_whether_a_worker_answers(error: Exception | None, expected: bool) -> None:
    assert await service(FakeWorkerClient(error=error)).is_healthy() is expected
