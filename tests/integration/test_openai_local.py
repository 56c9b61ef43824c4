"""The OpenAI API over a real socket, with the `openai` client and with clients that behave badly.

The model is random, so answers mean nothing; after every test the engine must be idle, whole and answering.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from local_server import DEADLINE_S, LocalServer, serve_locally, tiny_engine_config, wait_until

from pagoda.cluster.ingress.fields import NEUTRAL
from pagoda.worker.config import CacheConfig, SchedulerConfig
from pagoda.worker.errors import IntegrityError
from pagoda.worker.tokenizer import Tokenizer

MODEL = "tiny"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
LONG = MAX_MODEL_LEN - 100
"""An output that takes seconds: whoever goes away meanwhile goes early."""
MAX_NUM_SEQS, MAX_NUM_WAITING = 4, 8
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def serve_tiny(tiny: Path) -> Any:
    config = tiny_engine_config(
        tiny,
        max_model_len=MAX_MODEL_LEN,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_waiting=MAX_NUM_WAITING),
    )
    return serve_locally(config, model_name=MODEL)


@pytest.fixture(scope="module")
def shared_server(tiny: Path) -> Iterator[LocalServer]:
    with serve_tiny(tiny) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    """The server of this module. Whatever a test does to it, it must answer a good request afterwards."""
    yield shared_server
    answer = shared_server.openai.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    shared_server.wait_until_idle()
    assert shared_server.engine.failure is None


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny)


@pytest.fixture
def client(server: LocalServer) -> openai.OpenAI:
    return server.openai


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


# -- answers -------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=5)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode_chat(HELLO))
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.model == MODEL


def test_completion(client: openai.OpenAI) -> None:
    """Unlike chat, completions are 16 tokens long unless they say otherwise."""
    answer = client.completions.create(model=MODEL, prompt="Once upon a time")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text


@pytest.mark.parametrize("seed", range(5))
def test_chat_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, seed: int) -> None:
    """Random tokens are often pieces of characters; the pieces of text still make up what comes unstreamed."""
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "seed": seed}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 5
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_stream(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 20, "seed": 1}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stream_on_the_wire(server: LocalServer) -> None:
    """Server-sent events, one JSON object each, and `[DONE]` at the end."""
    response = post(server, CHAT, json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 3, "stream": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


def test_include_usage(client: openai.OpenAI) -> None:
    """One more chunk at the end, without choices, says what the unstreamed answer says."""
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 7, "n": 2, "seed": 1}
    client.chat.completions.create(**request)  # so that both find the same in the cache
    whole = client.chat.completions.create(**request)
    *chunks, last = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == whole.usage
    assert last.usage is not None
    assert last.usage.completion_tokens == 14


@pytest.mark.parametrize("stream", [False, True])
def test_samples(client: openai.OpenAI, stream: bool) -> None:
    """n samples are n different answers, each with its index and its end."""
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 10, "n": 3, "seed": 1}
    texts = dict.fromkeys(range(3), "")
    ends = []
    if stream:
        for chunk in client.chat.completions.create(**request, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    else:
        for whole in client.chat.completions.create(**request).choices:
            texts[whole.index] += whole.message.content or ""
            ends += [whole.index] if whole.finish_reason else []
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts.values())) == 3


def test_same_seed_same_answer_alone_or_in_a_crowd(client: openai.OpenAI) -> None:
    """A seed fixes the answer, whatever runs beside it; without one, answers differ."""

    def text(seed: int | None) -> str:
        answer = client.completions.create(model=MODEL, prompt="a", max_tokens=30, seed=seed)
        return answer.choices[0].text

    alone = text(1)
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(text, [1, 2, None, 1, None, 3, 1, None]))
    assert [crowd[0], crowd[3], crowd[6]] == [alone] * 3
    assert len(set(crowd)) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: openai.OpenAI, server: LocalServer, stream: bool) -> None:
    """The answer ends before the stop string, and the engine does not go on behind it."""
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "seed": 5}
    beginning = client.completions.create(**request | {"max_tokens": 20}).choices[0].text
    stop = beginning[10:14]
    expected = beginning[: beginning.index(stop)]
    before = server.engine.stats().num_computed_tokens
    if stream:
        chunks = list(client.completions.create(**request, stop=stop, stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**request, stop=[stop, "never comes"]).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (expected, "stop")
    server.wait_until_idle()
    assert server.engine.stats().num_computed_tokens < before + LONG


def test_stop_token(client: openai.OpenAI) -> None:
    """A stop token ends the answer and does not show, but counts: here, whichever comes first."""
    answer = client.completions.create(
        model=MODEL, prompt=[5], temperature=0, extra_body={"stop_token_ids": list(range(49152))}
    )
    assert answer.usage is not None
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("num_samples", [1, 3])
def test_cached_tokens_of_a_repeated_request(client: openai.OpenAI, num_samples: int) -> None:
    """The second identical request finds all whole blocks but the last token, which is always computed.

    What the samples of one request share among themselves was not in the cache.
    """
    prompt = list(range(1000 * num_samples, 1000 * num_samples + 100))
    usages = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, n=num_samples).usage for _ in range(2)
    ]
    assert [usage and usage.prompt_tokens for usage in usages] == [100, 100]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert [detail and detail.cached_tokens for detail in details] == [0, 96]


def test_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    """Through the model's own template: turn two repeats turn one, and only what is new is computed."""
    messages: list[Any] = [
        {"role": "system", "content": "You are a helpful assistant that answers in short and simple sentences."},
        {"role": "user", "content": "What do pagodas and caches have in common? Think of their layers."},
    ]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, seed=1)
    messages += [first.choices[0].message, {"role": "user", "content": "And what else?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert first.usage.prompt_tokens > 2 * BLOCK_SIZE
    assert cached >= first.usage.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(client: openai.OpenAI, stream: bool) -> None:
    """Choices are numbered prompt by prompt, sample by sample; each is what it would be alone."""
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "n": 2, "seed": 3}
    prompts = ["first", "second", "third"]
    alone = [choice.text for p in prompts for choice in client.completions.create(**request, prompt=p).choices]
    if stream:
        together = [""] * 6
        for chunk in client.completions.create(**request, prompt=prompts, stream=True):
            together[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = client.completions.create(**request, prompt=prompts)
        together = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 48
        assert answer.usage.prompt_tokens == 3
    assert together == alone


def test_prompts_as_tokens(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Token ids, one prompt or several, are taken as they are."""
    text, ids = "Once upon a time", tokenizer.encode("Once upon a time")
    kinds: list[Any] = [text, ids, [text, text], [ids, ids]]
    answers = [client.completions.create(model=MODEL, prompt=p, max_tokens=5, seed=2) for p in kinds]
    assert len({choice.text for answer in answers for choice in answer.choices}) == 1
    assert [answer.usage and answer.usage.prompt_tokens for answer in answers] == [len(ids) * k for k in (1, 1, 2, 2)]


def test_context_filled_to_the_last_token(client: openai.OpenAI) -> None:
    """The longest prompt that is accepted leaves room for one token, and that comes."""
    prompt = [7] * (MAX_MODEL_LEN - 1)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_MODEL_LEN


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("some/other")
    assert error.value.code == "model_not_found"


def test_health_and_documentation(server: LocalServer) -> None:
    assert server.http.get("/health").status_code == 200
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {CHAT, COMPLETIONS, "/v1/models", "/health"} <= set(paths)


def test_connection_is_kept_for_the_next_request(server: LocalServer) -> None:
    """Watching for a client that goes away must not eat the client's next request, be it sound or not."""
    good = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    local_addresses = set()
    for body, status in ((good, 200), (good | {"stream": True}, 200), (good | {"n": 0}, 400), (good, 200)):
        response = server.http.post(COMPLETIONS, json=body)
        assert response.status_code == status
        local_addresses.add(response.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(local_addresses) == 1


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model(server: LocalServer, path: str) -> None:
    body = {"model": "gpt-4o", "messages": HELLO} if path == CHAT else {"model": "gpt-4o", "prompt": "a"}
    assert_is_error(post(server, path, json.dumps(body)), 404, "model", code="model_not_found")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"not JSON", None),
        (b"\xff\xfe", None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "\\ud800"}', None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b"[" * 100_000, None),
        (b"{}", "model"),
        (b'{"model": 1}', "model"),
    ],
)
def test_body_that_is_no_request(server: LocalServer, path: str, content: bytes, param: str | None) -> None:
    assert_is_error(post(server, path, content), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x " * MAX_MODEL_LEN}]}, "prompt"),
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
        ({"n": MAX_NUM_WAITING + 1}, "n"),
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
        assert isinstance(server.engine.failure, IntegrityError)
