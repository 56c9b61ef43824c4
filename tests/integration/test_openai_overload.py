"""Deadlines, limits and a full queue, as clients of the OpenAI API meet them."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from local_server import DEADLINE_S, LocalServer, wait_until
from tiny_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LONG,
    MAX_NUM_SEQS,
    MAX_NUM_WAITING,
    MODEL,
    assert_is_error,
    post,
    post_json,
)

from pagoda.worker.deadlines import Pace

SOON_S = 0.3
STEP_S = 0.01
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "ignore_eos": True}


@contextmanager
def all_places_taken(server: LocalServer) -> Iterator[None]:
    with server.send(COMPLETIONS, BODY | {"n": MAX_NUM_SEQS}):
        wait_until(lambda: server.engine.stats().num_running == MAX_NUM_SEQS, "all places are taken")
        yield
    server.wait_until_idle()


@pytest.fixture
def unmeasured(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say that it would be too late: whatever has a deadline waits, or runs, to the end."""
    pace = server.engine._engine._pace
    monkeypatch.setattr(pace, "measure", lambda *_: None)
    monkeypatch.setattr(pace, "pace", Pace())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, BODY), (COMPLETIONS, BODY | {"prompt": ["a", "b"]}), (CHAT, {"model": MODEL, "messages": HELLO})],
)
def test_time_that_is_over_before_the_first_token_is_a_status(
    server: LocalServer, path: str, body: dict[str, Any]
) -> None:
    """Whoever waits for a place when it is over, streamed or not; its blocks and its place in the queue are free."""
    with all_places_taken(server):
        for stream in (False, True):
            response = post(server, path, json.dumps(body | {"timeout_s": SOON_S, "stream": stream}))
            assert_is_error(response, 504, None, code="deadline_exceeded")
            assert "retry-after" not in response.headers
            wait_until(lambda: server.engine.stats().num_waiting == 0, "nothing waits any more")


@pytest.mark.usefixtures("unmeasured")
def test_time_that_is_over_in_the_middle_of_a_stream_is_an_event(server: LocalServer) -> None:
    body = BODY | {"timeout_s": SOON_S, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as response:
        *_, error, done = [line for line in response.iter_lines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert done == "data: [DONE]"
    server.wait_until_idle()


def test_time_that_suffices_changes_nothing(server: LocalServer) -> None:
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    assert (
        post_json(server, COMPLETIONS, **body)["choices"]
        == post_json(server, COMPLETIONS, timeout_s=60, **body)["choices"]
    )


@pytest.mark.parametrize("timeout_s", [0, -1, 1e9])
def test_no_such_timeout(server: LocalServer, timeout_s: float) -> None:
    for path, body in ((COMPLETIONS, BODY), (CHAT, {"model": MODEL, "messages": HELLO})):
        assert_is_error(post(server, path, json.dumps(body | {"timeout_s": timeout_s})), 400, "timeout_s")


def test_engine_that_hangs_is_not_waited_for(server: LocalServer) -> None:
    """The worker would end it, but it stands still in a step: the ingress answers."""
    executor = server.engine._engine._executor
    execute = executor.execute

    def hang(plan: Any) -> Any:
        time.sleep(4 * SOON_S)
        return execute(plan)

    executor.execute = hang  # type: ignore[method-assign]
    response = post(server, COMPLETIONS, json.dumps(BODY | {"timeout_s": SOON_S}))
    executor.execute = execute  # type: ignore[method-assign]
    assert_is_error(response, 504, None, code="deadline_exceeded")
    server.wait_until_idle()


def test_what_cannot_be_in_time_is_refused_before_it_begins(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows by now what a step takes. With all places taken for long, what is short of time is told so."""
    executor = server.engine._engine._executor
    execute = executor.execute

    def steadily(plan: Any) -> Any:
        time.sleep(STEP_S)
        return execute(plan)

    with all_places_taken(server), monkeypatch.context() as patch:
        patch.setattr(executor, "execute", steadily)  # else one slow step on a busy machine would make it up
        pace = server.engine._engine._pace
        wait_until(lambda: pace.pace.step_s > STEP_S, "a step was measured")
        before = server.engine.stats().num_prompt_tokens
        timeout_s = 100 * STEP_S  # which would do for ten tokens, if it could begin now
        response = post(server, COMPLETIONS, json.dumps(BODY | {"max_tokens": 10, "timeout_s": timeout_s}))
        assert_is_error(response, 429, None, code="overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert server.engine.stats().num_prompt_tokens == before


def test_full_queue_does_without_the_newest(server: LocalServer) -> None:
    """As many wait as may, and one more comes: it gets 429, and when to try again; those before it go on waiting."""
    with all_places_taken(server), ExitStack() as waiting:
        for number in range(MAX_NUM_WAITING):
            waiting.enter_context(server.send(COMPLETIONS, BODY))
            wait_until(lambda number=number: server.engine.stats().num_waiting == number + 1, "it waits")  # type: ignore[misc]
        with ThreadPoolExecutor(4) as pool:
            late = [pool.submit(post, server, COMPLETIONS, json.dumps(BODY)) for _ in range(4)]
            for answer in late:
                response = answer.result(DEADLINE_S)
                assert_is_error(response, 429, None, code="overloaded")
                assert int(response.headers["retry-after"]) >= 1
        assert server.engine.stats().num_waiting == MAX_NUM_WAITING
    metrics = server.http.get("/metrics").text
    assert 'pagoda_requests_refused_total{ingress="local",reason="overloaded"} ' in metrics
    assert 'finished_reason="shed"' in metrics
