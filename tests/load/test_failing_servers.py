"""Whatever a server does is counted by its kind; nothing it does ends the test or makes a percentile wrong."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import (
    ASKED_AGAIN,
    DONE,
    HANG,
    RESET,
    Script,
    answered,
    delta,
    event,
    head,
    scripted_server,
    text,
    usage,
)

from pagoda.cluster.loadtest.openai_target import OpenAITarget, take_event
from pagoda.cluster.loadtest.report import Slo, summarize
from pagoda.cluster.loadtest.runner import LoadOptions, LoadRunner
from pagoda.cluster.loadtest.target import Answer, LoadRequest, SendError, TargetError
from pagoda.cluster.loadtest.workloads import Session, Turn

CHUNKED = head()[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@dataclass(frozen=True, slots=True)
class Questions:
    """A session of one turn for each text."""

    texts: tuple[str, ...]
    name: str = "questions"

    def sessions(self, seed: int) -> Iterator[Session]:  # noqa: ARG002
        for number in range(len(self.texts)):
            yield Session(number, (Turn((number + 1000,), 4),), start_s=0.0)


@dataclass(frozen=True, slots=True)
class Given:
    """These sessions."""

    given: tuple[Session, ...]
    name: str = "given"

    def sessions(self, seed: int) -> Iterator[Session]:  # noqa: ARG002
        yield from self.given


FAILURES: dict[str, tuple[str, Script]] = {
    "429": ("http_429", [head(429), b'{"error": {"message": "full"}}']),
    "500 with garbage": ("http_500", [head(500, "text/html"), b"\xff\xfe<html>"]),
    "429 without a word": ("http_429", [head(429), HANG]),
    "429 and reset": ("http_429", [b"HTTP/1.1 429 X\r\nContent-Length: 100\r\n\r\n", 0.01, RESET]),
    "reset at once": ("reset", [RESET]),
    "reset after the head": ("cut", [head(), 0.01, RESET]),
    "reset in the middle": ("cut", [head(), text("a"), 0.01, RESET]),
    "closed without a word": ("reset", []),
    "hangs at once": ("timeout", [HANG]),
    "hangs in the middle": ("timeout", [head(), text("a"), HANG]),
    "ends in the middle": ("cut", [head(), text("a")]),
    "ends in an event": ("cut", [head(), text("a"), b'data: {"choi']),
    "no stream": ("garbage", [head(content_type="application/json"), b'{"choices": [{"text": "a"}]}\n\n']),
    "an answer in one piece": ("garbage", [head(content_type="application/json"), b'{"choices": [{"text": "a"}]}']),
    "ends without an event": ("cut", [head()]),
    "only done": ("garbage", [head(), DONE]),
    "done without a reason": ("cut", [head(), text("a"), DONE]),
    "error in the stream": ("error_event", [head(), text("a"), event({"error": {"message": "no"}})]),
    "no HTTP": ("garbage", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n"]),
    "no events": ("garbage", [head(content_type="text/html"), b"<html>it works</html>\n\n"]),
    "no JSON": ("garbage", [head(), event("{")]),
    "deep JSON": ("garbage", [head(), event("[" * 100_000)]),
    "JSON of another kind": ("garbage", [head(), event('["a"]')]),
    "no choices": ("garbage", [head(), event("{}")]),
    "choices of another kind": ("garbage", [head(), event('{"choices": [7]}')]),
    "counts of another kind": ("garbage", [head(), text("a", "stop"), event('{"choices": [], "usage": [1]}')]),
    "counts below zero": ("garbage", [head(), text("a", "stop"), usage(prompt=-1, output=1), DONE]),
    "counts beyond all": ("garbage", [head(), text("a", "stop"), usage(prompt=1, output=10**401), DONE]),
    "text of another kind": ("garbage", [head(), event({"choices": [{"text": ["a"], "finish_reason": "stop"}]}), DONE]),
    "bad gzip": ("garbage", [head()[:-2] + b"Content-Encoding: gzip\r\n\r\n", b"no gzip at all" * 10]),
    "not UTF-8": ("garbage", [head(), b"data: \xff\xfe{}\n\n"]),
    "somewhere else": ("http_307", [b"HTTP/1.1 307 X\r\nLocation: /elsewhere\r\nConnection: close\r\n\r\n"]),
    "goes on and on": ("garbage", [head(), *[text("a")] * 100_000]),
    "no event at all": ("garbage", [head(), b"what is this\n"]),
    "the beginning of an event": ("cut", [head(), b'data: {"cho']),
    "half a field's name": ("cut", [head(), b"da"]),
    "more tokens than allowed": ("garbage", [head(), text("a", "stop"), usage(prompt=1, output=2**31 - 1), DONE]),
    "more cached than there are": ("garbage", [head(), text("a", "stop"), usage(prompt=9, output=1, cached=10), DONE]),
    "a bad chunk": ("garbage", [CHUNKED + b"zz\r\nfoo\r\n"]),
    "a bad chunk later": ("garbage", [CHUNKED, 0.05, b"zz\r\nfoo\r\n"]),
    "a bad chunk and no end": ("garbage", [CHUNKED, 0.05, b"zz\r\nfoo\r\n", HANG]),
    "a bad chunk behind a good one": ("garbage", [CHUNKED, chunk(text("a")), 0.05, b"zz\r\nfoo\r\n"]),
    "chunks that are none": ("garbage", [CHUNKED, 0.05, text("a"), DONE]),
    "a chunk that is cut": ("reset", [CHUNKED, chunk(text("a")), 0.05, b"ff\r\nfoo"]),
    "wrong length": ("reset", [b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n", text("a")]),
}


async def load(server_url: str, texts: tuple[str, ...], timeout_s: float = 0.5) -> dict[str, Any]:
    target = OpenAITarget(server_url, model="m", timeout_s=timeout_s)
    try:
        result = await LoadRunner(Questions(texts), target, LoadOptions(as_recorded=True)).run()
    finally:
        await target.close()
    summary = summarize(result, Slo(ttft_s=100.0))
    good_s = [record.e2e_s for record in result.records if record.error is None]
    assert summary["e2e_max_ms"] == (
        pytest.approx(max(good_s) * 1e3) if good_s else None
    )  # failures are in no percentile
    return summary


@pytest.mark.parametrize("name", FAILURES)
async def test_failures_are_counted_by_kind(name: str) -> None:
    kind, script = FAILURES[name]
    num = 0

    def script_of(_: str, body: dict[str, Any]) -> Script:
        nonlocal num
        num += 1
        return script if body["prompt"] == [1001] else answered("a", "b")

    async with scripted_server(script_of) as server:
        summary = await load(server.url, ("good", "bad", "good"))
    assert num == 3  # nothing is sent twice
    assert {name: n for name, n in summary.items() if name.startswith("failed_")} == {
        "failed_requests": 1,
        f"failed_{kind}": 1,
    }
    assert summary["succeeded_requests"] == 2
    assert summary["good_ratio"] == pytest.approx(2 / 3)
    assert summary["output_tokens"] == 4


async def test_nobody_listens() -> None:
    async with scripted_server(lambda *_: []) as server:
        url = server.url
    summary = await load(url, ("a", "b"))
    assert (summary["failed_refused"], summary["succeeded_requests"]) == (2, 0)
    assert summary["ttft_p50_ms"] is summary["e2e_p99_ms"] is summary["hit_ratio"] is None
    assert summary["goodput_rps"] == 0


async def test_models_of_no_server() -> None:
    target = OpenAITarget("127.0.0.1:1")
    with pytest.raises(TargetError, match=r"^no server at http://127\.0\.0\.1:1"):
        await target.models()
    await target.close()


async def test_pieces_and_counts() -> None:
    """Pieces may come split anywhere, several at once, with comments and CRLF between; usage counts, not pieces."""
    stream = b": hello\r\n\r\n" + delta("") + delta("Hé").replace(b"\n", b"\r\n") + delta(None) + delta("y", "stop")
    stream += usage(prompt=7, output=5, cached=4) + DONE
    for size in (1, 3, 1000):
        script = [head(), *(stream[i : i + size] for i in range(0, len(stream), size))]
        async with scripted_server(lambda *_, script=script: script) as server:
            target, answer = OpenAITarget(server.url, model="m"), Answer()
            await target.send(LoadRequest(5, ({"role": "user", "content": "x"},)), answer)
            await target.close()
        assert "".join(answer.text) == "Héy"
        assert len(answer.piece_s) == 2
        assert (answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens) == (7, 4, 5)
        assert server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("behind", [[HANG], [2.0], [b": and so on\n\n" * 1000, 2.0]], ids=["open", "late", "more"])
async def test_an_answer_ends_where_it_says_so(behind: list[Any]) -> None:
    """Scenario: a server, or a proxy before it, closes connections late. Times per token must not know of it."""
    async with scripted_server(lambda *_: [*answered("a", "b"), *behind]) as server:
        summary = await load(server.url, ("good", "good"), timeout_s=30.0)
    assert summary["succeeded_requests"] == 2
    assert summary["e2e_max_ms"] < 1900


async def test_whatever_goes_wrong_with_one_request_the_others_go_on() -> None:
    class Broken:
        async def send(self, request: LoadRequest, answer: Answer) -> None:
            if request.prompt == (1001,):
                raise ZeroDivisionError("by chance")
            answer.piece_s.append(0.0)
            answer.finish_reason = "stop"

    result = await LoadRunner(Questions(("a", "b", "c")), Broken(), LoadOptions(as_recorded=True)).run()  # type: ignore[arg-type]
    assert sorted(str(record.error) for record in result.records) == ["None", "None", "client"]


def kept(body: bytes) -> bytes:
    """An answer behind which the connection stays."""
    return f"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_a_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    """Scenario: a server keeps connections for a second, and the next question comes just then."""
    whole = kept(text("a", "stop") + DONE)
    async with scripted_server(lambda *_: [whole, ASKED_AGAIN, RESET]) as server:
        summary = await one_after_the_other(server.url, num_turns=4)
        assert len(server.bodies) == 4
    assert (summary["succeeded_requests"], summary["failed_requests"], summary["resent_requests"]) == (4, 0, 2)


async def test_a_server_that_keeps_no_promise_to_keep_connections() -> None:
    """Scenario: a balancer that has forgotten all of them. Sent once more means: over a new one."""
    whole = kept(text("a", "stop") + DONE)
    async with scripted_server(lambda *_: [whole, ASKED_AGAIN, RESET]) as server:
        sessions = tuple(Session(number, tuple(Turn("x", 1) for _ in range(3)), start_s=0.0) for number in range(6))
        target = OpenAITarget(server.url, model="m")
        result = await LoadRunner(Given(sessions), target, LoadOptions(as_recorded=True)).run()
        await target.close()
    summary = summarize(result, Slo())
    assert (summary["succeeded_requests"], summary["failed_requests"]) == (18, 0)


async def test_what_comes_behind_the_end_is_not_read() -> None:
    async with scripted_server(lambda *_: [*answered("a")[:-1], DONE + event({"error": {"message": "no"}})]) as server:
        assert (await load(server.url, ("good",)))["succeeded_requests"] == 1


async def test_a_server_that_dies_of_a_request_is_not_sent_it_again() -> None:
    """Even over a kept connection: what breaks later than at once is a failure."""
    whole = kept(text("a", "stop") + DONE)
    async with scripted_server(lambda *_: [whole, ASKED_AGAIN, 0.5, RESET]) as server:
        summary = await one_after_the_other(server.url, num_turns=2)
        assert len(server.bodies) == 1
    assert (summary["succeeded_requests"], summary["failed_reset"], summary["resent_requests"]) == (1, 1, 0)


async def one_after_the_other(url: str, num_turns: int) -> dict[str, Any]:
    turns = tuple(Turn("x", 1) for _ in range(num_turns))
    target = OpenAITarget(url, model="m")
    try:
        workload = Given((Session(0, turns, start_s=0.0),))
        return summarize(await LoadRunner(workload, target, LoadOptions(as_recorded=True)).run(), Slo())
    finally:
        await target.close()


async def test_a_connection_that_ends_late_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: the end of a chunked answer comes behind its [DONE]. The next turn must not wait for it."""
    monkeypatch.setattr("pagoda.cluster.loadtest.openai_target._EOF_WAIT_S", 3.0)
    whole = answered("a", "b")
    async with scripted_server(lambda *_: [*whole, HANG]) as server:
        turns = (Turn("x", 2), Turn("y", 2))
        workload = Given((Session(0, turns, start_s=0.0),))
        target = OpenAITarget(server.url, model="m")
        result = await LoadRunner(workload, target, LoadOptions(as_recorded=True)).run()
        await target.close()
    assert len(result.records) == 2
    assert result.records[1].sent_s - result.records[1].intended_s < 2.5


@pytest.mark.parametrize("piece", [b": and so on\n\n", delta("")], ids=["comments", "empty"])
async def test_events_without_text_and_without_end(piece: bytes) -> None:
    async with scripted_server(lambda *_: [head(), *[piece * 1000] * 1000]) as server:
        summary = await load(server.url, ("a",), timeout_s=30.0)
    assert summary["failed_garbage"] == 1


TOKENS = {
    "infinite": [head(), b'{"tokens": [1, Infinity]}'],
    "deep": [head(), b"[" * 200_000],
    "of text": [head(), b'{"tokens": ["a"]}'],
    "none": [head(404)],
    "reset": [RESET],
}


@pytest.mark.parametrize("name", TOKENS)
async def test_server_that_cannot_tell_tokens(name: str) -> None:
    async with scripted_server(lambda *_: TOKENS[name]) as server:
        target = OpenAITarget(server.url, model="m")
        assert await target.tokenize(LoadRequest(1, prompt="a")) is None
        await target.close()


async def test_latency_counts_from_when_it_was_due() -> None:
    """Scenario: a client that waits for a connection, or for itself, must not make the server look fast."""
    held = asyncio.Event()

    class Slow:
        async def send(self, request: LoadRequest, answer: Answer) -> None:  # noqa: ARG002
            held.set()
            answer.piece_s.append(1000.5)
            answer.finish_reason = "stop"

    clock = iter([1000.0, 1000.0, *[1000.25] * 100])
    runner = LoadRunner(Questions(("a",)), Slow(), LoadOptions(as_recorded=True), clock=lambda: next(clock))  # type: ignore[arg-type]
    result = await runner.run()
    (record,) = result.records
    assert (record.intended_s, record.sent_s, record.ttft_s) == (0.0, 0.25, 0.5)


def is_taken_or_refused(content: bytes) -> bool:
    try:
        take_event(content, Answer(), 0.0)
    except SendError as error:
        return error.kind in ("garbage", "error_event")
    return True


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_event(data: bytes) -> None:
    assert all(map(is_taken_or_refused, (data, b"data: " + data, b'data: {"choices": [' + data + b"]}")))


KEYS = ("choices", "delta", "content", "text", "usage", "prompt_tokens", "completion_tokens", "error", "finish_reason")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_json(chunk: dict[str, Any]) -> None:
    assert is_taken_or_refused(event(chunk).strip())
