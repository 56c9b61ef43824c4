"""Usage, ids and tokens in what the OpenAI API answers, over a real socket."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer
from tiny_server import CHAT, COMPLETIONS, HELLO, MAX_MODEL_LEN, MODEL, post_json, stream_json

from pagoda import __version__
from pagoda.cluster.ingress.request_id import HEADER
from pagoda.worker.tokenizer import Tokenizer

PROMPT = "Once upon a time, 日本"


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage(server: LocalServer, path: str) -> None:
    """Each chunk says the usage so far; the last one, without a choice, that of all."""
    body = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream_json(server, path, **body, max_tokens=10, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 20
    assert last["choices"] == []


def test_fingerprint_is_in_every_answer(server: LocalServer) -> None:
    found = {
        answer["system_fingerprint"]
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}))
        for answer in (post_json(server, path, **body, max_tokens=2), *stream_json(server, path, **body, max_tokens=2))
    }
    assert len(found) == 1


def test_request_id(server: LocalServer) -> None:
    """The client's goes into the answer's id and its header; one that cannot be used is refused."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    answer = server.http.post(COMPLETIONS, json=body, headers={HEADER: "job-7"})
    assert (answer.headers[HEADER], answer.json()["id"]) == ("job-7", "cmpl-job-7")
    streamed = server.http.post(COMPLETIONS, json=body | {"stream": True}, headers={HEADER: "job-8"})
    assert streamed.headers[HEADER] == "job-8"
    assert '"id":"cmpl-job-8"' in streamed.text
    answer = server.http.post(COMPLETIONS, json=body)
    assert answer.json()["id"] == f"cmpl-{answer.headers[HEADER]}"
    for path in (COMPLETIONS, "/health", "/nowhere"):
        for bad in ("x" * 129, "a b", "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()):
            answer = server.http.post(path, json=body, headers={HEADER: bad})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == HEADER
            assert answer.headers[HEADER] != bad


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", COMPLETIONS, {"model": MODEL, "prompt": ""}, 400),
        ("POST", COMPLETIONS, {"model": "other", "prompt": "a"}, 404),
        ("GET", COMPLETIONS, None, 405),
        ("GET", "/nowhere", None, 404),
        ("GET", "/health", None, 200),
    ],
)
def test_request_id_of_other_answers(server: LocalServer, method: str, path: str, body: Any, status: int) -> None:
    answer = server.http.request(method, path, json=body, headers={HEADER: "job-9"})
    assert (answer.status_code, answer.headers.get_list(HEADER)) == (status, ["job-9"])


def test_same_request_id_many_times_at_once(server: LocalServer) -> None:
    """Whoever repeats a request while the first one still runs is served too."""
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 50}
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda _: server.http.post(COMPLETIONS, json=body, headers={HEADER: "same"}), range(6))
        assert [answer.status_code for answer in answers] == [200] * 6


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", PROMPT, "<|im_start|>user\n", "\x00\ud7ff🙂"])
def test_tokenize_and_back(server: LocalServer, tokenizer: Tokenizer, text: str) -> None:
    answer = post_json(server, "/tokenize", prompt=text, return_token_strs=True)
    tokens = tokenizer.encode(text)
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), MAX_MODEL_LEN)
    assert len(answer["token_strs"]) == len(tokens)
    assert post_json(server, "/detokenize", tokens=tokens) == {"prompt": text}


def test_tokenize_messages(server: LocalServer, tokenizer: Tokenizer) -> None:
    """As a chat would: what is counted here is what is computed there. The model may be left out."""
    answer = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert answer["tokens"] == tokenizer.encode_chat(HELLO)
    assert answer["token_strs"] is None
    usage = post_json(server, CHAT, messages=HELLO, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    without = post_json(server, "/tokenize", messages=HELLO, add_generation_prompt=False)
    assert without["tokens"] == answer["tokens"][: without["count"]]
    assert without["count"] < answer["count"]


def test_version(server: LocalServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}
