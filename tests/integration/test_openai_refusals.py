"""What the OpenAI API refuses, over a real socket: at once, with the field's name, and nothing is the worse for it."""

import json
import logging
from typing import Any

import openai
import pytest
from local_server import LocalServer, wait_until
from tiny_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LONG,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MAX_NUM_WAITING,
    MODEL,
    assert_is_error,
    post,
)

from pagoda.cluster.ingress.fields import NEUTRAL
from pagoda.worker.quoting import MAX_MESSAGE


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model(server: LocalServer, path: str) -> None:
    body = {"model": "gpt-4o", "messages": HELLO} if path == CHAT else {"model": "gpt-4o", "prompt": "a"}
    assert_is_error(post(server, path, json.dumps(body)), 404, "model", code="model_not_found")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"not JSON", "body"),
        (b"\xff\xfe", "body"),
        (b'{"model": "\xff"}', "body"),
        (b'{"model": "\\ud800"}', "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'"text"', "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "model"),
        (b'{"model": 1}', "model"),
    ],
)
def test_body_that_is_no_request(server: LocalServer, path: str, content: bytes, param: str) -> None:
    assert_is_error(post(server, path, content), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x " * MAX_MODEL_LEN}]}, "messages"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": MAX_MODEL_LEN}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"n": MAX_NUM_SEQS + MAX_NUM_WAITING + 1}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"priority": 2**31}, "priority"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"surprise": 1}, "surprise"),
        *(({name: "asks for something"}, name) for name in sorted(NEUTRAL)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_field_that_is_refused(server: LocalServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    """A status and the field's name, streamed or not: what is wrong is known before the first event."""
    body = {"model": MODEL, "messages": HELLO} | ({"stream": True} if stream else {}) | fields
    if stream and "stream_options" in fields:
        body["stream"] = False
    assert_is_error(post(server, CHAT, json.dumps(body)), 400, param)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["a", ""], [[1], []], [-1], [10**6], [10**30], [1.5], [1, "a"], ["x"] * 1025, "x " * MAX_MODEL_LEN],
)
def test_prompt_that_is_refused(server: LocalServer, prompt: object) -> None:
    """Nothing is generated for the good ones among several prompts either."""
    before = server.engine.stats().num_computed_tokens
    response = post(server, COMPLETIONS, json.dumps({"model": MODEL, "prompt": prompt}))
    param = response.json()["error"]["param"]
    assert_is_error(response, 400, param)
    assert param.split(".")[0] == "prompt"
    assert server.engine.stats().num_computed_tokens == before


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", CHAT, 405, "POST"),
        ("PUT", COMPLETIONS, 405, "POST"),
        ("POST", "/v1/models", 405, "GET"),
        ("GET", "/", 404, None),
        ("POST", "/v1/embeddings", 404, None),
    ],
)
def test_unknown_path_or_method(server: LocalServer, method: str, path: str, status: int, allow: str | None) -> None:
    response = server.http.request(method, path)
    assert_is_error(response, status, None)
    assert response.headers.get("allow") == allow


def test_extreme_values_that_are_allowed(client: openai.OpenAI) -> None:
    """Whatever passes the checks must not break the step that it is computed in."""
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e-300},
        {"temperature": 1000},
        {"top_p": 1e-300},
        {"seed": 2**63 - 1},
        {"extra_body": {"top_k": 10**30}},
        {"extra_body": {"top_k": -1, "min_p": 1}},
        {"extra_body": {"priority": -(2**31)}},
        {"extra_body": {"min_tokens": 2, "stop_token_ids": list(range(49151))}},
        {"stop": ["\x00", "é", "\U0001f642" * 1000]},
    ]
    for fields in extremes:
        answer = client.completions.create(model=MODEL, prompt="a", max_tokens=3, **fields)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_overload(server: LocalServer, client: openai.OpenAI) -> None:
    """All places are taken: one more request is refused, with the time to wait, and welcome once there is room."""
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": LONG}
    with server.send(COMPLETIONS, request | {"n": 4}), server.send(COMPLETIONS, request | {"n": 8}):
        wait_until(lambda: server.num_sequences == MAX_NUM_SEQS + MAX_NUM_WAITING, "all places are taken")
        for stream in (False, True):
            response = post(server, COMPLETIONS, json.dumps(request | {"stream": stream}))
            assert_is_error(response, 429, None, code="overloaded")
            assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**request)
        assert server.num_sequences == MAX_NUM_SEQS + MAX_NUM_WAITING
    server.wait_until_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "x" * 100_000},
        {"x" * 100_000: 1},
        {"stream_options": {"\n" * 100_000: 1}},
        {"messages": [{"role": "\U0001f642" * 100_000, "content": "a"}]},
        {"logit_bias": {"x" * 100_000: 1}},
        {"chat_template_kwargs": {"x": "y" * 100_000}, "continue_final_message": "z" * 100_000},
        {"n": int("9" * 4000)},
    ],
)
def test_long_input_is_not_sent_back(server: LocalServer, fields: dict[str, Any]) -> None:
    """An error shows enough of it to be recognised."""
    response = post(server, CHAT, json.dumps({"model": MODEL, "messages": HELLO} | fields))
    assert 400 <= response.status_code < 500
    assert len(response.text) < 2000
    assert len(response.json()["error"]["message"]) <= MAX_MESSAGE


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * MAX_MODEL_LEN}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 10**6}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "n": 50}, "n"),
        (COMPLETIONS, {"prompt": "a " * MAX_MODEL_LEN}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": 50}, "n"),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 50}, "prompt"),
    ],
)
def test_too_much_is_named_as_it_was_written(
    server: LocalServer, path: str, fields: dict[str, Any], param: str
) -> None:
    assert_is_error(post(server, path, json.dumps({"model": MODEL} | fields)), 400, param)


def test_long_path_is_not_logged(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagoda"):
        assert server.http.get("/" + "x" * 10_000).status_code == 404
        wait_until(lambda: len(caplog.messages) == 1, "the request is logged")
    assert len(caplog.messages[0]) < 200
