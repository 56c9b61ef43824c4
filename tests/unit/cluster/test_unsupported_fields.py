"""Fields that the API does not know or support are refused by name; nothing is ignored silently."""

import json

import pytest
from bodies import chat, chat_problem, completion, problem

from pagoda.cluster.ingress.schemas import CompletionRequest

ASKS_FOR_SOMETHING = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "parallel_tool_calls": 1,
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "service_tier": "priority",
    "store": True,
    "suffix": "x",
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "web_search_options": {},
}
ASKS_FOR_NOTHING = [
    ("best_of", 1),
    ("function_call", "none"),
    ("functions", []),
    ("modalities", ["text"]),
    ("parallel_tool_calls", True),
    ("parallel_tool_calls", False),
    ("response_format", {"type": "text"}),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("store", False),
    ("suffix", ""),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("tools", []),
]


@pytest.mark.parametrize(("name", "value"), ASKS_FOR_SOMETHING.items())
def test_unsupported_field_is_refused_by_name(name: str, value: object) -> None:
    """A field that would change the answer and has no effect here must not be ignored, in chat or completions."""
    expected = (name, f"{name}: is not supported")
    assert chat_problem(**{name: value}) == expected
    assert problem(json.dumps({"model": "m", "prompt": "x", name: value}), CompletionRequest) == expected


@pytest.mark.parametrize(("name", "value"), [*ASKS_FOR_NOTHING, *((name, None) for name in ASKS_FOR_SOMETHING)])
def test_unsupported_field_that_asks_for_nothing(name: str, value: object) -> None:
    """Client libraries send defaults along; null always means the default."""
    assert chat(**{name: value}) == chat()
    assert completion(**{name: value}) == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", True), ("store", 0), ("store", 0.0), ("parallel_tool_calls", 1)],
)
def test_neutral_value_of_another_type(name: str, value: object) -> None:
    """In Python, `True == 1` and `0.0 == False`; in the API they are different things."""
    assert chat_problem(**{name: value}) == (name, f"{name}: is not supported")


@pytest.mark.parametrize("name", ["temprature", "max_token", "use_beam_search"])
def test_unknown_field_is_refused_by_name(name: str) -> None:
    """A misspelt field would otherwise have no effect, and nobody would know."""
    assert chat_problem(**{name: 1}) == (name, f"{name}: is unknown")


def test_completions_fields_are_not_chat_fields() -> None:
    assert chat_problem(prompt="x") == ("prompt", "prompt: is unknown")
    body = json.dumps({"model": "m", "prompt": "x", "max_completion_tokens": 1})
    assert problem(body, CompletionRequest) == ("max_completion_tokens", "max_completion_tokens: is unknown")
