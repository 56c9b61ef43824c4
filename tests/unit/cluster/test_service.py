"""Tokens of a worker's stream become text; whatever ends, ends what is below it."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from pagoda.cluster.ingress.service import (
    Generation,
    GenerationFailedError,
    InferenceService,
    TextOutput,
    merge,
    prompt_only,
)
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import EngineStoppedError, InvalidRequestError, OverloadedError
from pagoda.worker.text_decoder import TextDecoder, WindowDecoder
from pagoda.worker.types import FinishReason, Request, RequestId, SamplingParams, SequenceOutput, TokenLogprobs

LIMITS = EngineLimits(max_model_len=100, vocab_size=128, max_num_seqs=4, max_num_waiting=4)
DEADLINE_S = 10.0
START = "^"
"""A special token."""
STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


class AsciiTokenizer:
    """A token is a character's code. Remembers which thread encoded."""

    def __init__(self) -> None:
        self.encoding_thread: threading.Thread | None = None
        self.max_tokens: list[int | None] = []

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        self.max_tokens.append(max_tokens)
        self.encoding_thread = threading.current_thread()
        start = [ord(START)] if add_special_tokens else []
        return start + [ord(character) for character in text]

    def encode_chat(
        self, messages: Sequence[Any], options: ChatOptions | None = None, *, max_tokens: int | None = None
    ) -> list[int]:
        text = "".join(message["content"] for message in messages)
        adds_special_tokens = options is not None and options.add_special_tokens
        return self.encode(text, add_special_tokens=adds_special_tokens, max_tokens=max_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token == ord(START)))

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        return WindowDecoder(functools.partial(self.decode, skip_special_tokens=skip_special_tokens))


class FakeWorkerClient:
    """Streams batches of outputs that the test wrote, then waits for ever if told to."""

    def __init__(
        self,
        *batches: list[SequenceOutput],
        then_hangs: bool = False,
        then_fails: bool = False,
        error: Exception | None = None,
    ) -> None:
        self.batches = batches
        self.then_fails = then_fails
        self.then_hangs = then_hangs
        self.error = error
        self.requests: list[Request] = []
        self.is_streaming = asyncio.Event()
        self.num_given = 0
        self.completed_samples: list[int] = []
        self.is_closed = False

    async def ping(self) -> None:
        if self.error is not None:
            raise self.error

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        self.requests.append(request)
        self.is_streaming.set()
        try:
            if self.error is not None:
                raise self.error
            for batch in self.batches:
                self.num_given += 1
                yield batch
            if self.then_hangs:
                await asyncio.Event().wait()
            if self.then_fails:
                raise EngineStoppedError("the worker is gone")
        finally:
            self.is_closed = True

    def abort(self, request_id: RequestId) -> None:
        raise AssertionError(f"nobody asked to abort {request_id}")

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        assert request_id == self.requests[-1].request_id
        self.completed_samples.append(index)


def out(
    index: int,
    text: str,
    reason: FinishReason | None = None,
    *,
    stop_reason: int | None = None,
    error: str | None = None,
    cached: int = 0,
    prompt: str = "",
) -> SequenceOutput:
    """With a log probability for each token, and for each of those of `prompt`."""
    return SequenceOutput(
        RequestId("r"),
        index,
        tuple(map(ord, text)),
        reason,
        stop_reason,
        error=error,
        num_cached_tokens=cached,
        logprobs=logprobs(text),
        prompt_logprobs=logprobs(prompt),
    )


def logprobs(text: str) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(ord(character), -1.0, 2, ()) for character in text)


def service(client: FakeWorkerClient) -> InferenceService:
    return InferenceService(AsciiTokenizer(), client, LIMITS)  # type: ignore[arg-type]


async def pieces(client: FakeWorkerClient, **sampling: Any) -> list[TextOutput]:
    generation = service(client).generate([1], SamplingParams(**sampling))
    return [output async for batch in generation.outputs for output in batch]


async def texts(client: FakeWorkerClient, **sampling: Any) -> list[list[tuple[int, str, FinishReason | None]]]:
    generation = service(client).generate([1], SamplingParams(**sampling))
    return [[(o.index, o.text, o.finish_reason) for o in batch] async for batch in generation.outputs]


# -- one generation ------------------------------------------------------------------------------


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
    generation = prompt_only(service(client).generate([1], SamplingParams(max_tokens=1)))
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
    ids = [tested.generate([1], SamplingParams(), request_id="abc").request.request_id for _ in range(2)]
    assert all(request_id.startswith("abc-") for request_id in ids)
    assert len({*ids, tested.generate([1], SamplingParams()).request.request_id}) == 3


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
    outputs = service(client).generate([1], SamplingParams(stop=(".",))).outputs
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
    outputs = service(client).generate([1], SamplingParams()).outputs
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


async def test_refusal_by_the_worker_is_raised() -> None:
    with pytest.raises(OverloadedError, match="busy"):
        await texts(FakeWorkerClient(error=OverloadedError("busy")))


async def test_reader_that_goes_away_closes_the_stream() -> None:
    """A client that disconnects cancels the task that reads; the worker must hear of it at once."""
    client = FakeWorkerClient([out(0, "a")], then_hangs=True)
    outputs = service(client).generate([1], SamplingParams()).outputs
    await anext(outputs)
    reading = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert client.is_closed


async def test_outputs_closed_between_two_batches() -> None:
    client = FakeWorkerClient([out(0, "a")], [out(0, "b")])
    outputs = service(client).generate([1], SamplingParams()).outputs
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


async def test_check_uses_the_engine_limits() -> None:
    """The ingress refuses what no worker could serve, before it sends anything."""
    tested = service(FakeWorkerClient())
    tested.check([1], SamplingParams(max_tokens=99))
    with pytest.raises(InvalidRequestError, match="max_tokens: 100 is too much"):
        tested.check([1], SamplingParams(max_tokens=100))


@pytest.mark.parametrize(("error", "expected"), [(None, True), (TimeoutError(), False), (OSError(), False)])
async def test_health_is_whether_a_worker_answers(error: Exception | None, expected: bool) -> None:
    assert await service(FakeWorkerClient(error=error)).is_healthy() is expected


# -- several generations at once -----------------------------------------------------------------


def generations(*clients: FakeWorkerClient) -> list[Generation]:
    return [service(client).generate([1], SamplingParams()) for client in clients]


async def read_all(merged: list[Generation]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for _ in merge(merged):
            pass


async def until_no_task_is_left() -> None:
    await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()})), DEADLINE_S)


def assert_no_task_is_left() -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_merge_keeps_positions_and_order() -> None:
    """More batches than the queue holds, from three prompts: each one's come complete and in order."""
    letters = [chr(ord("a") + number % 26) for number in range(200)]
    clients = [
        FakeWorkerClient(*[[out(0, letter)] for letter in letters], [out(0, end, LENGTH)]) for end in ("0", "1", "2")
    ]
    merged = [""] * 3
    async for position, batch in merge(generations(*clients)):
        merged[position] += "".join(output.text for output in batch)
    assert merged == ["".join(letters) + end for end in ("0", "1", "2")]
    assert_no_task_is_left()


@pytest.mark.parametrize("num_others", [0, 1, 3])
async def test_merge_raises_and_closes_all_on_an_error(num_others: int) -> None:
    """One of several prompts fails: the answer as a whole fails, and nobody works on for nothing."""
    failing = FakeWorkerClient([out(0, "a")], [out(0, "", ERROR, error="broken")])
    others = [FakeWorkerClient([out(0, "b")], then_hangs=True) for _ in range(num_others)]
    with pytest.raises(GenerationFailedError, match="broken"):
        await read_all(generations(failing, *others))
    assert all(client.is_closed for client in (failing, *others))
    assert_no_task_is_left()


@pytest.mark.parametrize("num_generations", [1, 3])
@pytest.mark.parametrize("num_batches", [1, 200])
async def test_merge_closed_early_closes_all(num_generations: int, num_batches: int) -> None:
    """The reader goes away while the workers are ahead of it (the queue is full) or behind (all wait)."""
    clients = [FakeWorkerClient(*[[out(0, "a")]] * num_batches, then_hangs=True) for _ in range(num_generations)]
    merged = merge(generations(*clients))
    await anext(merged)
    for _ in range(10):  # lets the forwarding tasks run until they wait
        await asyncio.sleep(0)
    await asyncio.wait_for(merged.aclose(), DEADLINE_S)
    assert all(client.is_closed for client in clients)
    assert_no_task_is_left()


@pytest.mark.parametrize("num_generations", [1, 3])
async def test_merge_cancelled_while_it_waits_closes_all(num_generations: int) -> None:
    clients = [FakeWorkerClient(then_hangs=True) for _ in range(num_generations)]
    waiting = asyncio.create_task(anext(merge(generations(*clients))))  # type: ignore[arg-type]
    for client in clients:
        await client.is_streaming.wait()
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=DEADLINE_S)
    assert all(client.is_closed for client in clients)
    assert_no_task_is_left()


async def test_merge_closed_before_it_began() -> None:
    clients = [FakeWorkerClient(), FakeWorkerClient()]
    await merge(generations(*clients)).aclose()
    assert not any(client.requests for client in clients)
    assert_no_task_is_left()
