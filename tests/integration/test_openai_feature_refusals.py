"""What the OpenAI API refuses of vLLM's additions, with the field's name, and what extremes it takes."""

import json
from typing import Any

import pytest
from local_server import LocalServer
from tiny_server import CHAT, COMPLETIONS, HELLO, MODEL, VOCAB_SIZE, post_json

PROMPT = "Once upon a time, 日本"


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
        answer = post_json(server, COMPLETIONS, prompt="a", max_tokens=3, **fields)
        assert answer["usage"]["completion_tokens"] == 3 * fields.get("n", 1)
