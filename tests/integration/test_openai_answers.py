"""The OpenAI API over a real socket, with the `openai` client: answers, streamed and whole."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from local_server import LocalServer
from tiny_server import BLOCK_SIZE, CHAT, COMPLETIONS, HELLO, LONG, MAX_MODEL_LEN, MODEL, post

from pagoda.worker.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny)


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
    head = server.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
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
