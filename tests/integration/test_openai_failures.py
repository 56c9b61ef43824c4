"""Clients of the OpenAI API that go away, and an engine that fails: nothing leaks and nobody hangs."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from local_server import DEADLINE_S, LocalServer, wait_until
from tiny_server import CHAT, COMPLETIONS, HELLO, LONG, MAX_NUM_SEQS, MODEL, assert_is_error, post, serve_tiny

from pagoda.worker.errors import IntegrityError

# -- clients that go away ------------------------------------------------------------------------

LONG_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": LONG}),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": LONG, "n": 3}),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": LONG}),
]


@pytest.mark.parametrize(("path", "body"), LONG_REQUESTS)
def test_client_goes_while_it_waits_for_a_whole_answer(server: LocalServer, path: str, body: dict[str, Any]) -> None:
    before = server.engine.stats().num_computed_tokens
    with server.send(path, body):
        wait_until(lambda: server.engine.stats().num_computed_tokens > before + 10, "tokens are being computed")
    server.wait_until_idle()
    assert server.engine.stats().num_computed_tokens < before + LONG


@pytest.mark.parametrize(("path", "body"), LONG_REQUESTS)
def test_client_goes_while_it_reads_a_stream(server: LocalServer, path: str, body: dict[str, Any]) -> None:
    before = server.engine.stats().num_computed_tokens
    with server.send(path, body | {"stream": True}) as connection:
        received = b""
        while received.count(b"data: ") < 5:
            received += connection.recv(4096)
    server.wait_until_idle()
    assert server.engine.stats().num_computed_tokens < before + LONG


def test_client_goes_while_its_request_waits_for_a_place(server: LocalServer) -> None:
    """Its sequences never ran; they leave the queue without waiting for their turn."""
    running = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "n": MAX_NUM_SEQS}
    with server.send(COMPLETIONS, running):
        wait_until(lambda: server.engine.stats().num_running == MAX_NUM_SEQS, "all places are taken")
        with server.send(COMPLETIONS, running | {"n": 2}):
            wait_until(lambda: server.engine.stats().num_waiting == 2, "the second request waits")
        wait_until(lambda: server.engine.stats().num_waiting == 0, "the second request is gone")
        assert server.engine.stats().num_running == MAX_NUM_SEQS
    server.wait_until_idle()


def test_many_clients_go_at_once(server: LocalServer) -> None:
    """Every way of going, all at the same time."""
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:

            def come_and_go(number: int) -> None:
                path, body = LONG_REQUESTS[0]
                with server.send(path, body | {"stream": number % 2 == 0}) as connection:
                    if number % 4 == 0:
                        connection.recv(100)

            list(pool.map(come_and_go, range(8)))
        server.wait_until_idle()


def test_request_that_is_never_finished(server: LocalServer) -> None:
    """The client announces a body, sends half of it and goes."""
    with server.send(COMPLETIONS, {}) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")


# -- an engine that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_failed_step_fails_its_requests_only(server: LocalServer, client: openai.OpenAI, stream: bool) -> None:
    """Before the first token an error is a status, streamed or not; the next request is none the worse."""
    request: dict[str, Any] = {"model": MODEL, "prompt": "a"}
    server.make_steps_fail(RuntimeError("no memory"), times=1)
    assert_is_error(post(server, COMPLETIONS, json.dumps(request | {"stream": stream})), 500, None)
    assert client.completions.create(**request).choices[0].text


def test_failed_step_in_the_middle_of_a_stream(server: LocalServer) -> None:
    """The status is gone by then: the error is an event, and the stream still ends properly."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        assert "choices" in next(lines)
        server.make_steps_fail(RuntimeError("no memory"), times=1)
        *_, error, done = [line for line in lines if line]
    assert "no memory" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


def test_engine_dies_with_requests_in_flight(tiny: Path) -> None:
    """Its bookkeeping broke: every client gets an error and none hangs, running, waiting, streaming or coming later."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG}
    with serve_tiny(tiny) as server, ThreadPoolExecutor(MAX_NUM_SEQS + 2) as pool:
        with server.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as streaming:
            lines = streaming.iter_lines()
            assert "choices" in next(lines)
            others = [pool.submit(post, server, COMPLETIONS, json.dumps(body)) for _ in range(MAX_NUM_SEQS + 2)]
            wait_until(lambda: server.num_sequences == MAX_NUM_SEQS + 3, "all requests are in the engine")
            server.make_steps_fail(IntegrityError("a block is owned twice"))
            *_, error, done = [line for line in lines if line]
            assert "the engine died" in json.loads(error.removeprefix("data: "))["error"]["message"]
            assert done == "data: [DONE]"
        for other in others:
            assert_is_error(other.result(DEADLINE_S), 500, None)
        late = post(server, COMPLETIONS, json.dumps(body))
        assert_is_error(late, 503, None, code="unavailable")
        assert "retry-after" in late.headers
        assert server.http.get("/health").status_code == 503
        assert server.http.head("/health").status_code == 503
        assert isinstance(server.engine.failure, IntegrityError)
