"""A service that stops: what its clients get, whatever they are doing at that time."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import DEADLINE_S, LocalServer, serve_locally, tiny_engine_config, wait_until

from pagoda.worker.config import CacheConfig, SchedulerConfig

MODEL = "tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 8000, "ignore_eos": True}
FOREVER_S = 1000.0


@pytest.fixture
def server(tiny: Path) -> Iterator[LocalServer]:
    """One for each test, since none takes requests again. It runs two sequences at a time."""
    config = tiny_engine_config(
        tiny, cache=CacheConfig(num_blocks=4096), scheduler=SchedulerConfig(max_num_seqs=2, max_num_waiting=8)
    )
    with serve_locally(config, model_name=MODEL) as server:
        yield server
        server.wait_until_idle()


def events_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def wait_until_it_refuses(server: LocalServer) -> None:
    wait_until(lambda: server.http.get("/health").status_code == 503, "it says that it stops")


def test_new_requests_are_refused_and_a_stream_ends_whole(server: LocalServer) -> None:
    with server.http.stream("POST", COMPLETIONS, json=LONG | {"max_tokens": 1000, "stream": True}) as stream:
        drained = server.drain(FOREVER_S)
        wait_until_it_refuses(server)
        for path, body in (
            (COMPLETIONS, LONG),
            (COMPLETIONS, LONG | {"stream": True, "prompt": ["a", "b"]}),
            (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}),
        ):
            refused = server.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "unavailable"
        assert server.http.get("/v1/models").status_code == 200
        *_, last, done = events_of(stream)
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    drained.result(DEADLINE_S)


def test_what_takes_too_long_is_told(server: LocalServer) -> None:
    """Streams by an event, whole answers by a status, and those that still wait for a place as well."""
    with ThreadPoolExecutor(4) as pool, server.http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as stream:
        wholes = [pool.submit(server.http.post, COMPLETIONS, json=LONG | {"n": n}) for n in (1, 1, 2)]
        wait_until(lambda: server.num_sequences == 5, "all requests are here")
        server.drain(0).result(DEADLINE_S)
        *_, last, done = events_of(stream)
        assert "aborted" in json.loads(last)["error"]["message"]
        assert done == "[DONE]"
        for whole in wholes:
            answer = whole.result(DEADLINE_S)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


def test_client_that_does_not_read_is_not_waited_for(server: LocalServer) -> None:
    with server.send(COMPLETIONS, LONG | {"n": 4, "logprobs": 5, "stream": True}) as connection:
        assert connection.recv(1)
        server.drain(0).result(DEADLINE_S)
