"""`pagoda chat` with input from a pipe, against a server that says what the test tells it to."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_openai import FakeOpenAI, fake_openai, piece, usage

from pagoda.cluster.chat_client import Answer, ChatClient, ChatError
from pagoda.cluster.cli import main

DONE = "data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai("tiny", "other") as server:
        yield server


def answer(text: str, reason: str = "stop") -> list[dict[str, object] | str]:
    """A stream of the words of a text."""
    words = [piece(word) for word in text.split(" ")]
    return [*words, piece("", reason), usage(prompt=20, output=len(words), cached=16), DONE]


def chat(server: FakeOpenAI, stdin: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--url", server.url, *options], input=stdin)


def test_answers_on_standard_output_all_else_on_standard_error(server: FakeOpenAI) -> None:
    server.answers = [
        [piece("Hello"), piece(", 日本!"), piece("", "stop"), usage(prompt=20, output=5, cached=16), DONE]
    ]
    result = chat(server, "Hi\n")
    assert (result.exit_code, result.stdout) == (0, "Hello, 日本!\n")
    assert f"tiny at {server.url}" in result.stderr
    statistics = result.stderr.splitlines()[-1]
    assert statistics.startswith("[TTFT ")
    assert statistics.endswith(" tokens/s · 5 tokens · 16 of 20 prompt tokens cached]")


def test_turns_and_a_new_conversation(server: FakeOpenAI) -> None:
    """Each turn sends all before it; /clear forgets them, but not the system prompt; blank lines say nothing."""
    server.answers = [answer(text) for text in ("one", "two", "three")]
    result = chat(server, "a\n\n  b  \n/clear\nc\n/exit\nd\n", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\nthree\n")
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "a"}]
    assert [request["messages"] for request in server.requests] == [
        first,
        [*first, {"role": "assistant", "content": "one"}, {"role": "user", "content": "  b  "}],
        [system, {"role": "user", "content": "c"}],
    ]


def test_text_with_line_ends_of_unicode(server: FakeOpenAI) -> None:
    """Scenario: a model writes U+2028. JSON holds it as it is, and httpx takes it for the end of a line."""
    text = "one\u2028two\u2029three\x85four"
    server.answers = [[f"data: {json.dumps(piece(text, 'stop'), ensure_ascii=False)}\r\n\r\n", "data: [DONE]\n\n"]]
    result = chat(server, "hello\n")
    assert (result.exit_code, text in result.stdout) == (0, True), result.output


def test_sampling_options(server: FakeOpenAI) -> None:
    """What is given is sent, what is not is the server's to choose."""
    server.answers = [answer("a"), answer("b")]
    chat(server, "a\n")
    assert set(server.requests[0]) == {"model", "messages", "stream", "stream_options"}
    options = "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --max-tokens 7 --seed 1 --stop x --stop y"
    chat(server, "a\n", *options.split(), "--model", "other", "--api-key", "secret")
    sent = {name: server.requests[1][name] for name in server.requests[1].keys() - server.requests[0].keys()}
    assert sent == {
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 7, "seed": 1, "stop": ["x", "y"]
    }  # fmt: skip
    assert server.requests[1]["model"] == "other"
    assert server.headers[1]["Authorization"] == "Bearer secret"


def test_cut_answer_says_so(server: FakeOpenAI) -> None:
    server.answers = [answer("a b", "length")]
    assert "cut: out of tokens" in chat(server, "a\n").stderr


def test_message_that_looks_like_a_command(server: FakeOpenAI) -> None:
    server.answers = [answer("a")]
    chat(server, "/etc/passwd is what?\n/help\n")
    assert server.requests[0]["messages"][0]["content"] == "/etc/passwd is what?"
    assert len(server.requests) == 1


def test_ctrl_c_stops_an_answer(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come stays, in the conversation too; one without text is as if it had not been asked."""
    asked = []

    def ask(_self: ChatClient, _model: str, messages: list[object], _: object, answer: Answer) -> Iterator[str]:
        asked.append(list(messages))
        if len(asked) == 1:
            raise KeyboardInterrupt
        answer.text = "half"
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatClient, "ask", ask)
    result = chat(server, "a\nb\nc\n")
    assert (result.exit_code, result.stdout) == (0, "half\nhalf\n")
    assert result.stderr.count("stopped]") == 3
    b = {"role": "user", "content": "b"}
    assert asked[1:] == [[b], [b, {"role": "assistant", "content": "half"}, {"role": "user", "content": "c"}]]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            (400, '{"error": {"message": "temperature: must be positive"}}'),
            "answers 400: temperature: must be positive",
        ),
        ((429, '{"error": {"message": "full"}}'), "answers 429: full"),
        ((502, "<html>bad gateway"), "answers 502: <html>bad gateway"),
        ((500, ""), "answers 500: Internal Server Error"),
        ([piece("a"), {"error": {"message": "the worker died"}}], "the worker died"),
        ([piece("a")], "broke off before the answer was complete"),
        ([piece("a"), "data: {]\n\n"], "not JSON"),
        ([piece("a"), "data: 7\n\n"], "not an event"),
        ([piece("a"), {"choices": [{"delta": {"content": [1]}}]}], "not an event"),
        ([piece("a"), {"choices": [], "usage": [1]}], "not an event"),
        (["data: " + "[" * 100_000 + "\n\n"], "not JSON"),
        ((307, ""), "answers 307: Temporary Redirect"),
    ],
)
def test_error_in_a_pipe_ends_with_one_line(server: FakeOpenAI, reply: object, said: str) -> None:
    """Nobody is there to ask again, so the next line is not sent."""
    server.answers = [reply]  # type: ignore[list-item]
    result = chat(server, "a\nb\n")
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[-1]
    assert len(server.requests) == 1


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_input_that_is_not_text(server: FakeOpenAI, locale: str) -> None:
    """In the locale of containers, Python lets such bytes through as half surrogates."""
    command = [Path(sys.executable).with_name("pagoda"), "chat", "--url", server.url]
    environment = os.environ | {"LC_ALL": locale, "PYTHONIOENCODING": "utf-8:surrogateescape"}
    for extra, stdin in (([], b"abc\xff\n"), (["--system", b"\xff"], b"a\n"), (["--stop", b"\xff"], b"a\n")):
        result = subprocess.run([*command, *extra], input=stdin, capture_output=True, env=environment, check=False)
        assert result.returncode == 1
        assert b"Traceback" not in result.stderr
        assert b"not text" in result.stderr.splitlines()[-1]
    assert not server.requests


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "nan"), "--temperature: must be finite"),
        (("--top-p", "inf"), "--top-p: must be finite"),
        (("--api-key", "ä€"), "--api-key: must be printable ASCII"),
        (("--url", f"http://{'a' * 70}.x"), "is not a URL"),
        (("--url", ""), "is not a URL"),
    ],
)
def test_bad_options(server: FakeOpenAI, options: tuple[str, ...], said: str) -> None:
    result = chat(server, "a\n", *options)
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[-1]
    assert not server.requests


def test_thoughts_are_time_too(server: FakeOpenAI) -> None:
    """Their tokens are in the server's count."""
    clock = iter([0.0, 2.0, 6.0, 10.0])
    thought = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None}]}
    server.answers = [[thought, piece("a"), piece("b", "stop"), usage(prompt=9, output=5, cached=0), DONE]]
    client, answer = ChatClient(server.url, clock=lambda: next(clock)), Answer()
    assert list(client.ask("tiny", [], {}, answer)) == ["a", "b"]
    client.close()
    assert (answer.ttft_s, answer.decode_s, answer.tokens_per_s) == (6.0, 8.0, 0.5)


def test_what_a_server_says_does_not_steer_the_terminal(server: FakeOpenAI) -> None:
    server.answers = [(400, '{"error": {"message": "\\u001b]0;x\\u0007\\u009b"}}')]
    assert "answers 400: \u241b]0;x\u2407\ufffd" in chat(server, "a\n").stderr


def test_half_a_surrogate_pair(server: FakeOpenAI) -> None:
    server.answers = [[piece("a\ud800b", "stop"), DONE], answer("c")]
    result = chat(server, "x\ny\n")
    assert (result.exit_code, result.stdout) == (0, "a?b\nc\n")
    assert server.requests[1]["messages"][1]["content"] == "a?b"


def test_no_server() -> None:
    result = CliRunner().invoke(main, ["chat", "--url", "127.0.0.1:1"], input="a\n")
    assert result.exit_code == 1
    assert result.stderr == "Error: no server answers at http://127.0.0.1:1; `pagoda serve` starts one\n"


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://127.0.0.1:x", "http://"])
def test_bad_url(url: str) -> None:
    result = CliRunner().invoke(main, ["chat", "--url", url], input="a\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")


def test_model_that_is_not_served(server: FakeOpenAI) -> None:
    assert "huge is not served" in chat(server, "a\n", "--model", "huge").stderr
    server.models = []
    assert "serves no model" in chat(server, "a\n").stderr


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_url_with_and_without_version(server: FakeOpenAI, suffix: str) -> None:
    client = ChatClient(server.url + suffix)
    assert client.models() == ["tiny", "other"]
    client.close()


def test_times_of_an_answer(server: FakeOpenAI) -> None:
    """By a clock that the test holds: 2 s to the first text, then 4 tokens in 8 s."""
    clock = iter([0.0, 2.0, 6.0, 10.0])
    server.answers = [
        [piece(""), piece("a"), piece("b"), piece("c", "stop"), usage(prompt=9, output=5, cached=0), DONE]
    ]
    client, answer = ChatClient(server.url, clock=lambda: next(clock)), Answer()
    assert list(client.ask("tiny", [], {}, answer)) == ["a", "b", "c"]
    client.close()
    assert (answer.ttft_s, answer.decode_s, answer.tokens_per_s) == (2.0, 8.0, 0.5)
    assert (answer.text, answer.finish_reason, answer.num_cached_tokens) == ("abc", "stop", 0)


def test_server_that_is_something_else(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.dumps", lambda _: "[]")
    client = ChatClient(server.url)
    with pytest.raises(ChatError, match="does not answer as an OpenAI API"):
        client.models()
    client.close()
