"""What the OpenAI API reports besides text, and vLLM's additions to it, over a real socket with the `openai` client.

The model is random, so answers mean nothing; that they are the same in all forms does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from local_server import LocalServer, serve_locally, tiny_engine_config
from tiny_server import CHAT, COMPLETIONS, HELLO, MODEL, post_json, stream_json

from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.config import CacheConfig, SchedulerConfig
from pagoda.worker.tokenizer import Tokenizer

MAX_MODEL_LEN = 2048
PROMPT = "Once upon a time, 日本"


@pytest.fixture(scope="module")
def shared_server(tiny: Path) -> Iterator[LocalServer]:
    config = tiny_engine_config(
        tiny,
        max_model_len=MAX_MODEL_LEN,
        cache=CacheConfig(block_size=16, num_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_waiting=64, max_num_batched_tokens=64),
    )
    with serve_locally(config, model_name=MODEL) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    yield shared_server
    shared_server.wait_until_idle()
    assert shared_server.engine.failure is None


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny)


@pytest.fixture
def client(server: LocalServer) -> openai.OpenAI:
    return server.openai


# -- log probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_chat_logprobs(client: openai.OpenAI, seed: int) -> None:
    """One entry for each token; their bytes are the text. Streamed, the same come in pieces."""
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "seed": seed}
    request |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**request)
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert len(content) == whole.usage.completion_tokens == 20
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode("utf-8", "replace") == whole.choices[0].message.content
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= values[0] < 0
    pieces = []
    for chunk in client.chat.completions.create(**request, stream=True):
        if chunk.choices[0].logprobs is not None:
            pieces += chunk.choices[0].logprobs.content or []
    assert pieces == content


@pytest.mark.parametrize("num_top", [0, 5])
def test_completion_logprobs(client: openai.OpenAI, num_top: int) -> None:
    """Greedy takes the most probable token. Streamed, the same come in pieces."""
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 20, "temperature": 0, "logprobs": num_top}
    whole = client.completions.create(**request).choices[0].logprobs
    assert whole is not None
    assert whole.token_logprobs is not None
    assert whole.tokens is not None
    assert whole.top_logprobs is not None
    assert whole.text_offset is not None
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == len(whole.text_offset) == 20
    for token, logprob, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert next(iter(top.items())) == (token, logprob)
        assert len(top) == max(num_top, 1)
    assert whole.text_offset == sorted(whole.text_offset)
    streamed: dict[str, list[Any]] = {}
    for chunk in client.completions.create(**request, stream=True):
        assert chunk.choices[0].logprobs is not None
        for name, values in chunk.choices[0].logprobs.model_dump().items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == whole.model_dump()


def test_logprobs_end_with_the_text(client: openai.OpenAI) -> None:
    """Tokens that were computed behind a stop string do not show, here either."""
    request: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 200, "seed": 5, "logprobs": 0}
    text = client.completions.create(**request | {"max_tokens": 20}).choices[0].text
    answer = client.completions.create(**request, stop=text[10:14])
    assert answer.usage is not None
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == answer.usage.completion_tokens < 200


def test_prompt_logprobs(server: LocalServer, tokenizer: Tokenizer) -> None:
    """Of the whole prompt, though it was computed in chunks and is in the cache; not of what comes behind."""
    tokens = tokenizer.encode(PROMPT * 30)
    assert len(tokens) > 200
    for _ in range(2):
        answer = post_json(server, COMPLETIONS, prompt=tokens, max_tokens=1, prompt_logprobs=2)
        shown = answer["choices"][0]["prompt_logprobs"]
        assert shown[0] is None
        assert [str(token) in entry for token, entry in zip(tokens[1:], shown[1:], strict=True)] == [True] * len(
            tokens[1:]
        )
        assert {len(entry) for entry in shown[1:]} <= {2, 3}
        assert all({1, 2} <= {value["rank"] for value in entry.values()} for entry in shown[1:])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["choices"][0]["logprobs"] is None


def test_prompt_logprobs_of_a_chat(server: LocalServer, tokenizer: Tokenizer) -> None:
    answer = post_json(server, CHAT, messages=HELLO, max_tokens=2, prompt_logprobs=0, n=2, return_token_ids=True)
    tokens = tokenizer.encode_chat(HELLO)
    assert answer["prompt_token_ids"] == tokens
    assert [list(entry) for entry in answer["prompt_logprobs"][1:]] == [[str(token)] for token in tokens[1:]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2, 2]


# -- echo ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: LocalServer, tokenizer: Tokenizer, stream: bool) -> None:
    """Texts come back as they were, tokens as their text, with every sample."""
    for prompt, texts in (
        (PROMPT, [PROMPT]),
        (tokenizer.encode(PROMPT), [PROMPT]),
        (["a", "b"], ["a", "b"]),
    ):
        request: dict[str, Any] = {"prompt": prompt, "max_tokens": 5, "seed": 1, "n": 2}
        plain = post_json(server, COMPLETIONS, **request)
        answers = [""] * len(plain["choices"])
        if stream:
            for event in stream_json(server, COMPLETIONS, **request, echo=True):
                answers[event["choices"][0]["index"]] += event["choices"][0]["text"]
        else:
            answers = [choice["text"] for choice in post_json(server, COMPLETIONS, **request, echo=True)["choices"]]
        expected = [text for text in texts for _ in range(2)]
        assert answers == [text + c["text"] for text, c in zip(expected, plain["choices"], strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: LocalServer, tokenizer: Tokenizer, stream: bool) -> None:
    """The prompt's are what `prompt_logprobs` says, then come the output's; the offsets run through both."""
    tokens = tokenizer.encode(PROMPT * 10)
    request: dict[str, Any] = {"prompt": tokens, "max_tokens": 5, "seed": 1, "n": 2, "logprobs": 0}
    plain = post_json(server, COMPLETIONS, **request, prompt_logprobs=0)
    of_prompt = [
        entry and entry[str(token)]["logprob"]
        for token, entry in zip(tokens, plain["choices"][0]["prompt_logprobs"], strict=True)
    ]
    joined: list[dict[str, list[Any]]] = [{}, {}]
    if stream:
        choices = [event["choices"][0] for event in stream_json(server, COMPLETIONS, **request, echo=True)]
    else:
        choices = post_json(server, COMPLETIONS, **request, echo=True)["choices"]
    for choice in choices:
        for name, values in choice["logprobs"].items():
            joined[choice["index"]].setdefault(name, []).extend(values)
    for found, without in zip(joined, plain["choices"], strict=True):
        assert found["token_logprobs"] == pytest.approx(of_prompt + without["logprobs"]["token_logprobs"], abs=1e-4)
        assert found["tokens"][len(tokens) :] == without["logprobs"]["tokens"]
        offsets = [offset + len(PROMPT * 10) for offset in without["logprobs"]["text_offset"]]
        assert found["text_offset"][len(tokens) :] == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_the_prompt(server: LocalServer, tokenizer: Tokenizer, stream: bool) -> None:
    """As evaluation harnesses ask: what does the model think of this text?"""
    tokens = tokenizer.encode(PROMPT)
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        *chunks, last = stream_json(server, COMPLETIONS, **request, stream_options={"include_usage": True})
        choices, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
    else:
        answer = post_json(server, COMPLETIONS, **request)
        choices, usage = answer["choices"], answer["usage"]
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == len(tokens)
    assert choices[-1]["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 0)


# -- penalties and bias --------------------------------------------------------------------------


def test_penalties_change_greedy_answers(server: LocalServer) -> None:
    """Greedy output of a random model soon goes round in circles; penalties keep it from that."""

    def num_different(**sampling: Any) -> int:
        answer = post_json(
            server, COMPLETIONS, prompt="a", max_tokens=60, temperature=0, return_token_ids=True, **sampling
        )
        return len(set(answer["choices"][0]["token_ids"]))

    plain = num_different()
    assert plain < 30
    for sampling in ({"presence_penalty": 2}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1e6}):
        assert num_different(**sampling) > plain + 10


def test_logit_bias(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("!")
    answer = client.completions.create(
        model=MODEL, prompt="a", max_tokens=5, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == "!!!!!"


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_in_the_output(server: LocalServer, stream: bool) -> None:
    request: dict[str, Any] = {"prompt": "a", "max_tokens": 200, "seed": 5}
    beginning = post_json(server, COMPLETIONS, **request | {"max_tokens": 20})["choices"][0]["text"]
    stop = beginning[10:14]
    request |= {"stop": ["never comes", stop], "include_stop_str_in_output": True}
    choices = (
        [event["choices"][0] for event in stream_json(server, COMPLETIONS, **request)]
        if stream
        else post_json(server, COMPLETIONS, **request)["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == beginning[: beginning.index(stop) + len(stop)]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_stop_reason(server: LocalServer) -> None:
    """The stop token's id; null for the end of sequence, which here is token 0, and for the limit."""
    request: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    ends = []
    for fields in ({"logit_bias": {"7": 100}, "stop_token_ids": [7]}, {"logit_bias": {"0": 100}}, {}):
        (choice,) = post_json(server, COMPLETIONS, **request, **fields)["choices"]
        ends.append((choice["finish_reason"], choice["stop_reason"]))
    assert ends == [("stop", 7), ("stop", None), ("length", None)]


@pytest.mark.parametrize(("skips", "text"), [(True, ""), (None, ""), (False, "<|im_start|>" * 3)])
def test_special_tokens(server: LocalServer, skips: bool | None, text: str) -> None:
    answer = post_json(server, CHAT, messages=HELLO, max_tokens=3, logit_bias={"1": 100}, temperature=0,
                  skip_special_tokens=skips)  # fmt: skip
    assert answer["choices"][0]["message"]["content"] == text


# -- chats ---------------------------------------------------------------------------------------


def test_answer_that_is_continued(server: LocalServer, tokenizer: Tokenizer) -> None:
    """The prompt ends inside the last message; with `echo` the answer begins with it."""
    messages = [*HELLO, {"role": "assistant", "content": "Hello, I"}]
    request: dict[str, Any] = {"messages": messages, "max_tokens": 5, "seed": 1, "continue_final_message": True}
    answer = post_json(server, CHAT, **request, return_token_ids=True)
    prompt = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nHello, I")
    content = answer["choices"][0]["message"]["content"]
    assert post_json(server, CHAT, **request, echo=True)["choices"][0]["message"]["content"] == "Hello, I" + content
    chunks = stream_json(server, CHAT, **request, echo=True)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello, I" + content


def test_no_generation_prompt(server: LocalServer, tokenizer: Tokenizer) -> None:
    answer = post_json(server, CHAT, messages=HELLO, max_tokens=1, add_generation_prompt=False, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(HELLO, ChatOptions(add_generation_prompt=False))
    assert answer["prompt_token_ids"] != tokenizer.encode_chat(HELLO)
