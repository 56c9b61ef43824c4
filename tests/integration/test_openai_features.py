"""What the OpenAI API reports besides text, and vLLM's additions to it, over a real socket with the `openai` client.

The model is random, so answers mean nothing; that they are the same in all forms does.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from local_server import LocalServer, serve_locally, tiny_engine_config

from pagoda import __version__
from pagoda.cluster.ingress.request_id import HEADER
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.config import CacheConfig, SchedulerConfig
from pagoda.worker.tokenizer import Tokenizer

MODEL = "tiny"
MAX_MODEL_LEN = 2048
VOCAB_SIZE = 49152
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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


def post(server: LocalServer, path: str, **body: Any) -> dict[str, Any]:
    """An answer as JSON, with what the `openai` package does not know of."""
    response = server.http.post(path, json={"model": MODEL} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(server: LocalServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={"model": MODEL, "stream": True} | body)
    assert response.status_code == 200, response.text
    *chunks, _done, _end = response.text.split("\n\n")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


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
        answer = post(server, COMPLETIONS, prompt=tokens, max_tokens=1, prompt_logprobs=2)
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
    answer = post(server, CHAT, messages=HELLO, max_tokens=2, prompt_logprobs=0, n=2, return_token_ids=True)
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
        plain = post(server, COMPLETIONS, **request)
        answers = [""] * len(plain["choices"])
        if stream:
            for event in events(server, COMPLETIONS, **request, echo=True):
                answers[event["choices"][0]["index"]] += event["choices"][0]["text"]
        else:
            answers = [choice["text"] for choice in post(server, COMPLETIONS, **request, echo=True)["choices"]]
        expected = [text for text in texts for _ in range(2)]
        assert answers == [text + c["text"] for text, c in zip(expected, plain["choices"], strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: LocalServer, tokenizer: Tokenizer, stream: bool) -> None:
    """The prompt's are what `prompt_logprobs` says, then come the output's; the offsets run through both."""
    tokens = tokenizer.encode(PROMPT * 10)
    request: dict[str, Any] = {"prompt": tokens, "max_tokens": 5, "seed": 1, "n": 2, "logprobs": 0}
    plain = post(server, COMPLETIONS, **request, prompt_logprobs=0)
    of_prompt = [
        entry and entry[str(token)]["logprob"]
        for token, entry in zip(tokens, plain["choices"][0]["prompt_logprobs"], strict=True)
    ]
    joined: list[dict[str, list[Any]]] = [{}, {}]
    if stream:
        choices = [event["choices"][0] for event in events(server, COMPLETIONS, **request, echo=True)]
    else:
        choices = post(server, COMPLETIONS, **request, echo=True)["choices"]
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
        *chunks, last = events(server, COMPLETIONS, **request, stream_options={"include_usage": True})
        choices, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
    else:
        answer = post(server, COMPLETIONS, **request)
        choices, usage = answer["choices"], answer["usage"]
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == len(tokens)
    assert choices[-1]["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 0)


# -- penalties and bias --------------------------------------------------------------------------


def test_penalties_change_greedy_answers(server: LocalServer) -> None:
    """Greedy output of a random model soon goes round in circles; penalties keep it from that."""

    def num_different(**sampling: Any) -> int:
        answer = post(server, COMPLETIONS, prompt="a", max_tokens=60, temperature=0, return_token_ids=True, **sampling)
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
    beginning = post(server, COMPLETIONS, **request | {"max_tokens": 20})["choices"][0]["text"]
    stop = beginning[10:14]
    request |= {"stop": ["never comes", stop], "include_stop_str_in_output": True}
    choices = (
        [event["choices"][0] for event in events(server, COMPLETIONS, **request)]
        if stream
        else post(server, COMPLETIONS, **request)["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == beginning[: beginning.index(stop) + len(stop)]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_stop_reason(server: LocalServer) -> None:
    """The stop token's id; null for the end of sequence, which here is token 0, and for the limit."""
    request: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    ends = []
    for fields in ({"logit_bias": {"7": 100}, "stop_token_ids": [7]}, {"logit_bias": {"0": 100}}, {}):
        (choice,) = post(server, COMPLETIONS, **request, **fields)["choices"]
        ends.append((choice["finish_reason"], choice["stop_reason"]))
    assert ends == [("stop", 7), ("stop", None), ("length", None)]


@pytest.mark.parametrize(("skips", "text"), [(True, ""), (None, ""), (False, "<|im_start|>" * 3)])
def test_special_tokens(server: LocalServer, skips: bool | None, text: str) -> None:
    answer = post(server, CHAT, messages=HELLO, max_tokens=3, logit_bias={"1": 100}, temperature=0,
                  skip_special_tokens=skips)  # fmt: skip
    assert answer["choices"][0]["message"]["content"] == text


# -- chats ---------------------------------------------------------------------------------------


def test_answer_that_is_continued(server: LocalServer, tokenizer: Tokenizer) -> None:
    """The prompt ends inside the last message; with `echo` the answer begins with it."""
    messages = [*HELLO, {"role": "assistant", "content": "Hello, I"}]
    request: dict[str, Any] = {"messages": messages, "max_tokens": 5, "seed": 1, "continue_final_message": True}
    answer = post(server, CHAT, **request, return_token_ids=True)
    prompt = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nHello, I")
    content = answer["choices"][0]["message"]["content"]
    assert post(server, CHAT, **request, echo=True)["choices"][0]["message"]["content"] == "Hello, I" + content
    chunks = events(server, CHAT, **request, echo=True)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello, I" + content


def test_no_generation_prompt(server: LocalServer, tokenizer: Tokenizer) -> None:
    answer = post(server, CHAT, messages=HELLO, max_tokens=1, add_generation_prompt=False, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(HELLO, ChatOptions(add_generation_prompt=False))
    assert answer["prompt_token_ids"] != tokenizer.encode_chat(HELLO)


# -- usage, ids, fingerprint ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage(server: LocalServer, path: str) -> None:
    """Each chunk says the usage so far; the last one, without a choice, that of all."""
    body = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(server, path, **body, max_tokens=10, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 20
    assert last["choices"] == []


def test_fingerprint_is_in_every_answer(server: LocalServer) -> None:
    found = {
        answer["system_fingerprint"]
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}))
        for answer in (post(server, path, **body, max_tokens=2), *events(server, path, **body, max_tokens=2))
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
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: server.http.post(COMPLETIONS, json=body, headers={HEADER: "same"}), range(8))
        assert [answer.status_code for answer in answers] == [200] * 8


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", PROMPT, "<|im_start|>user\n", "\x00\ud7ff🙂"])
def test_tokenize_and_back(server: LocalServer, tokenizer: Tokenizer, text: str) -> None:
    answer = post(server, "/tokenize", prompt=text, return_token_strs=True)
    tokens = tokenizer.encode(text)
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), MAX_MODEL_LEN)
    assert len(answer["token_strs"]) == len(tokens)
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": text}


def test_tokenize_messages(server: LocalServer, tokenizer: Tokenizer) -> None:
    """As a chat would: what is counted here is what is computed there. The model may be left out."""
    answer = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert answer["tokens"] == tokenizer.encode_chat(HELLO)
    assert answer["token_strs"] is None
    usage = post(server, CHAT, messages=HELLO, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    without = post(server, "/tokenize", messages=HELLO, add_generation_prompt=False)
    assert without["tokens"] == answer["tokens"][: without["count"]]
    assert without["count"] < answer["count"]


def test_version(server: LocalServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(
            (path, {name: value}, name)
            for path in (CHAT, COMPLETIONS)
            for name, value in (
                ("presence_penalty", 2.1),
                ("frequency_penalty", float("nan")),
                ("repetition_penalty", 0),
                ("repetition_penalty", float("inf")),
                ("logit_bias", {"1": 101}),
                ("logit_bias", {"one": 1}),
                ("logit_bias", {str(VOCAB_SIZE): 1}),
                ("logit_bias", {str(token): 1 for token in range(1025)}),
                ("prompt_logprobs", 21),
                ("best_of", 2),
                ("best_of", 0),
            )
        ),
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (
            CHAT,
            {
                "messages": [*HELLO, {"role": "assistant", "content": "I"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "add_generation_prompt",
        ),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (
            COMPLETIONS,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_field_that_is_refused(server: LocalServer, path: str, fields: dict[str, Any], param: str) -> None:
    """With the field's name, before anything is computed."""
    before = server.engine.stats().num_computed_tokens
    body = {"model": MODEL} | {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "a"}}.get(path, {}) | fields
    response = server.http.post(path, content=json.dumps(body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert server.engine.stats().num_computed_tokens == before


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_model_that_is_not_served(server: LocalServer, path: str) -> None:
    body = {"model": "other", "prompt": "a"} if path == "/tokenize" else {"model": "other", "tokens": [1]}
    response = server.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_extreme_values_that_are_allowed(server: LocalServer) -> None:
    """Whatever passes the checks must not break the step that it is computed in."""
    extremes: list[dict[str, Any]] = [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300, "temperature": 1e-300},
        {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.01},
        {"logit_bias": {str(token): -100 for token in range(1024)}},
        {"logit_bias": {"0": 100}, "min_tokens": 3},
        {"logprobs": 20, "prompt_logprobs": 20, "echo": True, "n": 3},
        {"logprobs": 0, "min_tokens": 2, "stop_token_ids": list(range(VOCAB_SIZE - 1))},
    ]
    for fields in extremes:
        answer = post(server, COMPLETIONS, prompt="a", max_tokens=3, **fields)
        assert answer["usage"]["completion_tokens"] == 3 * fields.get("n", 1)
