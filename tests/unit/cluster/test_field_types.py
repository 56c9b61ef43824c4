"""Values of wrong types, and bodies that are no request: a refusal names the field."""

import json
from typing import Any

import pytest
from bodies import HELLO, chat, chat_problem, problem
from pydantic import ValidationError

from pagoda.cluster.ingress.messages import MAX_MESSAGES, MAX_PARTS
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.schemas import ChatCompletionRequest, CompletionRequest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("n", False),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", [1]),
        ("seed", "x"),
        ("stream", "true"),
        ("stream", 1),
        ("ignore_eos", 0),
        ("stop", 1),
        ("stop", {"a": "b"}),
        ("stop_token_ids", 1),
        ("stream_options", True),
        ("priority", "high"),
        ("user", 1),
        ("metadata", [1]),
        ("model", None),
        ("model", 1),
        *(
            (name, value)
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
            for value in ("1", [])
        ),
        ("logit_bias", [[1, 2]]),
        ("logit_bias", "1"),
        ("logprobs", 1),
        ("logprobs", "true"),
        ("top_logprobs", "5"),
        ("top_logprobs", 1.5),
        ("prompt_logprobs", True),
        ("echo", 1),
        ("return_token_ids", "yes"),
        ("add_generation_prompt", 1),
        ("continue_final_message", "no"),
        ("chat_template_kwargs", []),
        ("add_special_tokens", 0),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "false"),
        ("messages", "Hello"),
        ("messages", []),
        ("messages", None),
    ],
)
def test_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    """No coercion: "5" is not 5, true is not 1."""
    field, message = chat_problem(**{name: value})
    assert field == name
    assert message.startswith(f"{name}: ")


def test_integer_where_a_number_is_meant() -> None:
    assert chat(temperature=1, top_p=1).sampling_params(default_max_tokens=None).temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages.1.content"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages.1.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": ["Hello"]}, "messages.0"),
        ({"messages": [{**HELLO[0], "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls"),
        ({"messages": [{**HELLO[0], "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
        ({"messages": [{**HELLO[0], "weight": 1}]}, "messages.0.weight"),
        ({"stop": ["a", 1]}, "stop.1"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids.1"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ],
)
def test_nested_field_is_named_by_its_path(fields: dict[str, Any], field: str) -> None:
    named, message = chat_problem(**fields)
    assert named == field
    assert message.startswith(f"{field}: ")


def test_image_part_is_refused() -> None:
    """Content may be a text or a list of text parts; a list with an image is not told that it should be a text."""
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert chat_problem(messages=[{"role": "user", "content": parts}]) == (
        "messages.0.content.1.type",
        "messages.0.content.1.type: Input should be 'text'",
    )


@pytest.mark.parametrize("body", ["", "{", "nonsense", '{"model": "m",}', b"\xff", '{"model": "\\ud800"}', "[" * 5000])
def test_body_that_is_no_json(body: str | bytes) -> None:
    field, message = problem(body)
    assert field == "body"
    assert message.startswith("body: not valid JSON: ")


@pytest.mark.parametrize("body", ["[]", "null", "1", '"text"', "[{}]"])
def test_body_that_is_no_object(body: str) -> None:
    field, message = problem(body)
    assert field == "body"
    assert message.startswith("body: ")


def test_missing_fields() -> None:
    assert problem("{}")[0] == "model"
    assert problem('{"model": "m"}')[0] == "messages"
    assert problem('{"model": "m"}', CompletionRequest)[0] == "prompt"


MANY = 100_000


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ["a", 1] * MANY}, "prompt.1"),
        ({"prompt": [["a"]] * MANY}, "prompt.0.0"),
        ({"prompt": "a", "stop": [1] * MANY}, "stop.0"),
        ({"prompt": "a", "stop_token_ids": ["a"] * MANY}, "stop_token_ids.0"),
        ({"prompt": "a"} | {f"x{index}": 1 for index in range(MANY)}, "body"),
    ],
    ids=["prompts", "token ids", "stops", "stop tokens", "unknown fields"],
)
def test_mistakes_by_the_million_are_not_collected(body: dict[str, Any], field: str) -> None:
    """A body has room for a million; each that is described holds the interpreter's lock."""
    with pytest.raises(ValidationError) as error:
        CompletionRequest.model_validate_json(json.dumps({"model": "m"} | body))
    assert error.value.error_count() < 10
    assert first_problem(error.value.errors())[0] == field


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "none"}] * MANY,
        [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1),
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_PARTS + 1)}],
    ],
    ids=["wrong", "too many", "too many parts"],
)
def test_too_much_of_a_chat(messages: list[Any]) -> None:
    with pytest.raises(ValidationError) as error:
        ChatCompletionRequest.model_validate_json(json.dumps({"model": "m", "messages": messages}))
    assert error.value.error_count() < 10
    assert (first_problem(error.value.errors())[0]).startswith("messages")
