"""A small server, and what tests of the API ask of it. The model is random, so answers mean nothing."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
from local_server import LocalServer, serve_locally, tiny_engine_config

from pagoda.worker.config import CacheConfig, SchedulerConfig

MODEL = "tiny"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 49152
LONG = MAX_MODEL_LEN - 100
"""An output that takes seconds: whoever goes away meanwhile goes early."""
MAX_NUM_SEQS, MAX_NUM_WAITING = 4, 8
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def serve_tiny(tiny: Path, *, tenants_path: Path | None = None) -> AbstractContextManager[LocalServer]:
    config = tiny_engine_config(
        tiny,
        max_model_len=MAX_MODEL_LEN,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_waiting=MAX_NUM_WAITING),
    )
    return serve_locally(config, model_name=MODEL, tenants_path=tenants_path)


def post(server: LocalServer, path: str, content: bytes | str) -> httpx.Response:
    return server.http.post(path, content=content)


def assert_is_error(response: httpx.Response, status: int, param: str | None, *, code: str | None = None) -> None:
    """Exactly the shape that OpenAI clients expect."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert body["error"]["message"]


def post_json(server: LocalServer, path: str, **body: Any) -> dict[str, Any]:
    """An answer as JSON, with what the `openai` package does not know of."""
    response = server.http.post(path, json={"model": MODEL} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream_json(server: LocalServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={"model": MODEL, "stream": True} | body)
    assert response.status_code == 200, response.text
    *chunks, _done, _end = response.text.split("\n\n")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
