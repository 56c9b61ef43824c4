"""Clients that are hard on a server: too much, too many, too slow, and gone. None stops or slows the others."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_server import DEADLINE_S, LocalServer, serve_locally, tiny_engine_config, wait_until
from tiny_model import write_tiny_model

from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES
from pagoda.worker.config import CacheConfig, SchedulerConfig

MODEL = "tiny"
COMPLETIONS = "/v1/completions"
GOOD: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared_server(tiny: Path) -> Iterator[LocalServer]:
    config = tiny_engine_config(
        tiny, cache=CacheConfig(num_blocks=2048), scheduler=SchedulerConfig(max_num_seqs=16, max_num_waiting=512)
    )
    with serve_locally(config, model_name=MODEL) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    yield shared_server
    shared_server.wait_until_idle()
    assert shared_server.http.post(COMPLETIONS, json=GOOD).status_code == 200


def test_large_body_is_refused_at_once(server: LocalServer) -> None:
    """50 MB are announced; the answer comes before any of it is sent."""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
        answer = client.makefile("rb").read()
    assert b" 413 " in answer.splitlines()[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "body"


def test_large_body_without_a_length_is_refused(server: LocalServer) -> None:
    """Chunked: it is counted as it comes."""

    def chunks() -> Iterator[bytes]:
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"a" * 2**20
        yield b'"}'

    answer = server.http.post(COMPLETIONS, content=chunks())
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")


def test_body_that_just_fits_is_judged_by_its_content(server: LocalServer) -> None:
    """A prompt of 2 MB is too long for the model, which is said with the field's name."""
    answer = server.http.post(COMPLETIONS, json=GOOD | {"prompt": "a b " * 500_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_invalid_utf8(server: LocalServer) -> None:
    answer = server.http.post(COMPLETIONS, content=b'{"model": "tiny", "prompt": "\xff\xfe"}')
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_messages_that_the_template_refuses(tmp_path: Path) -> None:
    """This model's template raises for a system message that is not the first; the client hears it, streamed or not."""
    with serve_locally(tiny_engine_config(write_tiny_model(tmp_path)), model_name=MODEL) as server:
        messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
        for stream in (False, True):
            body = {"model": MODEL, "messages": messages, "stream": stream, "max_tokens": 1}
            answer = server.http.post("/v1/chat/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "messages")
            assert error["message"].endswith("the model's chat template refuses them: system comes first")
        good = {"model": MODEL, "messages": messages[:1], "max_tokens": 1}
        assert server.http.post("/v1/chat/completions", json=good).status_code == 200


def test_two_hundred_connections_at_once(server: LocalServer) -> None:
    """All of them open before the first one asks; every one is answered."""
    content = json.dumps(GOOD).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) for _ in range(200)]
    for client in clients:
        client.sendall(head.encode() + content)
    statuses = [client.makefile("rb").readline() for client in clients]
    for client in clients:
        client.close()
    assert [status.split()[1] for status in statuses] == [b"200"] * 200


def test_reader_that_stands_still_delays_nobody(server: LocalServer) -> None:
    """Its stream fills every buffer on the way; others are served meanwhile, and it gets all in the end."""
    body = GOOD | {"max_tokens": 4000, "stream": True, "n": 4}
    with server.send(COMPLETIONS, body) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        first = slow.recv(1)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: server.http.post(COMPLETIONS, json=GOOD).status_code, range(20)))
        assert answers == [200] * 20
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # megabytes in pieces of 4 KiB take minutes
        text = first
        while not text.endswith(b"0\r\n\r\n"):
            text += slow.recv(2**16)
    assert text.count(b'"finish_reason":"length"') == 4
    assert b"data: [DONE]" in text


def test_client_that_never_finishes_its_request(server: LocalServer) -> None:
    """Half a body, then nothing, then gone: nothing was started for it."""
    before = server.engine.stats().num_prompt_tokens
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model": ')
        assert server.http.post(COMPLETIONS, json=GOOD).status_code == 200
    wait_until(lambda: server.is_idle, "nothing runs")
    assert server.engine.stats().num_prompt_tokens == before + 1
