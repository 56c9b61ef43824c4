"""What the API accepts and what it refuses. A refusal names the field; nothing is ignored silently."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pagoda.cluster.ingress.fields import Strict
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagoda.cluster.ingress.usage import usage
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.types import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]

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


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(json.dumps({"model": "m", "messages": HELLO} | fields))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"model": "m", "prompt": "Hello"} | fields))


def problem(body: str | bytes, kind: type[Strict] = ChatCompletionRequest) -> tuple[str | None, str]:
    """(field, message) of a body that must be refused."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(body)
    return first_problem(error.value.errors())


def chat_problem(**fields: Any) -> tuple[str | None, str]:
    return problem(json.dumps({"model": "m", "messages": HELLO} | fields))


# -- unsupported and unknown fields --------------------------------------------------------------


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


# -- types ---------------------------------------------------------------------------------------


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
    assert field is None
    assert message.startswith("not valid JSON: ")


@pytest.mark.parametrize("body", ["[]", "null", "1", '"text"', "[{}]"])
def test_body_that_is_no_object(body: str) -> None:
    field, message = problem(body)
    assert field is None
    assert message.startswith("body: ")


def test_missing_fields() -> None:
    assert problem("{}")[0] == "model"
    assert problem('{"model": "m"}')[0] == "messages"
    assert problem('{"model": "m"}', CompletionRequest)[0] == "prompt"


# -- meaning -------------------------------------------------------------------------------------


def test_sampling_fields_arrive() -> None:
    """Every sampling field of a body is the engine's parameter of the same name."""
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 1, "0": -100},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 3,
    }
    expected = SamplingParams(
        **fields | {"stop": ("a", "b"), "stop_token_ids": (1, 2), "logit_bias": {7: 1.0, 0: -100.0}}
    )
    assert completion(**fields).sampling_params(default_max_tokens=None) == expected
    assert chat(**fields).sampling_params(default_max_tokens=None) == expected


def test_defaults() -> None:
    """Nulls and missing fields take the engine's defaults; the length's is the endpoint's."""
    nulls = dict.fromkeys(SamplingParams.__dataclass_fields__)
    assert chat().sampling_params(default_max_tokens=None) == SamplingParams(max_tokens=None)
    assert chat(**nulls).sampling_params(default_max_tokens=None) == SamplingParams(max_tokens=None)
    assert completion(**nulls).sampling_params(default_max_tokens=16) == SamplingParams(max_tokens=16)


def test_one_stop_string_or_several() -> None:
    assert chat(stop="ab").sampling_params(default_max_tokens=1).stop == ("ab",)
    assert chat(stop=[]).sampling_params(default_max_tokens=1).stop == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 101}),
        *(("logit_bias", {name: 1}) for name in ("-1", "x", "", "1.0", " 1", "1_0", "\u0661", "1" * 5000)),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as error:
        chat(**{"max_tokens": 5, name: value}).sampling_params(default_max_tokens=None)
    assert error.value.field == name


def test_max_completion_tokens_is_max_tokens() -> None:
    """Today's name, yesterday's name, or both if they agree."""
    for fields in ({"max_completion_tokens": 5}, {"max_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        body = chat(**fields)
        body.check()
        assert body.sampling_params(default_max_tokens=None).max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
    ],
)
def test_rules_between_fields(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        chat(**fields).check()
    assert error.value.field == field


def test_include_usage() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert not chat(stream=True).include_usage


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_kinds_of_prompts(prompt: object, prompts: object) -> None:
    """A text or token ids, one or a list of them."""
    body = completion(prompt=prompt)
    body.check()
    assert body.prompts == prompts


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: must not be empty"):
        completion(prompt=prompt).check()


@pytest.mark.parametrize("prompt", [None, 1, [None], [1, "a"], [[1], "a"], [1.5], [True], {}])
def test_prompt_of_a_wrong_type(prompt: object) -> None:
    field, _ = problem(json.dumps({"model": "m", "prompt": prompt}), CompletionRequest)
    assert field is not None
    assert field.startswith("prompt")


def test_messages_for_the_template() -> None:
    """Templates know `system` and plain text: `developer` is renamed, text parts are joined."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}])
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "ab"},
    ]


def test_answer_sent_back_as_a_message() -> None:
    """Clients append the answer's message as it came, with everything that it does not contain as null."""
    answer = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat(messages=[*HELLO, answer]).messages[1].for_template() == {"role": "assistant", "content": "Hi"}


def test_usage_adds_up() -> None:
    assert usage(num_prompt_tokens=5, num_output_tokens=3, num_cached_tokens=4).model_dump() == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


# -- log probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_of_chats(fields: dict[str, Any], expected: int | None) -> None:
    body = chat(**fields)
    body.check()
    assert body.num_logprobs == body.sampling_params(default_max_tokens=None).logprobs == expected


@pytest.mark.parametrize("value", [-1, 21])
def test_logprobs_of_completions_out_of_range(value: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logprobs: must be in"):
        completion(logprobs=value).sampling_params(default_max_tokens=1)


@pytest.mark.parametrize("value", [True, False, "1", 1.0])
def test_logprobs_of_completions_of_a_wrong_type(value: object) -> None:
    """A number here, true or false in chats."""
    assert problem(json.dumps({"model": "m", "prompt": "x", "logprobs": value}), CompletionRequest)[0] == "logprobs"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": 3}, (3, None)),
        ({"logprobs": 3, "echo": True}, (3, 3)),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, (3, 5)),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 0}, (3, 3)),
        ({"echo": True}, (None, None)),
        ({"echo": True, "prompt_logprobs": 0}, (None, 0)),
    ],
)
def test_echo_needs_the_logprobs_of_the_prompt(fields: dict[str, Any], expected: tuple[int | None, int | None]) -> None:
    sampling = completion(**fields).sampling_params(default_max_tokens=1)
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected


def test_prompt_only() -> None:
    """With `echo`, no output may be asked for, which otherwise is out of range."""
    body = completion(echo=True, max_tokens=0)
    assert body.is_prompt_only
    assert body.sampling_params(default_max_tokens=16).max_tokens == 1
    assert not completion(echo=True).is_prompt_only
    with pytest.raises(InvalidRequestError, match=r"^max_tokens: "):
        completion(max_tokens=0).sampling_params(default_max_tokens=16)


# -- chat template -------------------------------------------------------------------------------

TO_CONTINUE = [*HELLO, {"role": "assistant", "content": "Hi, I"}]


def test_chat_options() -> None:
    assert chat().chat_options() == ChatOptions()
    assert chat(
        add_generation_prompt=False, chat_template_kwargs={"a": [1]}, add_special_tokens=True
    ).chat_options() == ChatOptions(False, False, {"a": [1]}, True)


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": None}, {"add_generation_prompt": False}])
def test_message_to_continue_takes_the_place_of_the_generation_prompt(fields: dict[str, Any]) -> None:
    body = chat(messages=TO_CONTINUE, continue_final_message=True, **fields)
    assert body.chat_options() == ChatOptions(add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {"messages": TO_CONTINUE, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_chat_options_that_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        chat(**fields).chat_options()
    assert error.value.field == field


# -- tokenize ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HELLO}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "x", "continue_final_message": False}, "continue_final_message"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ],
)
def test_tokenize_takes_either_a_prompt_or_messages(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        TokenizeRequest.model_validate_json(json.dumps(fields)).check()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (TokenizeRequest, {"prompt": 1}, "prompt"),
        (TokenizeRequest, {"prompt": ["a"]}, "prompt"),
        (TokenizeRequest, {"messages": []}, "messages"),
        (TokenizeRequest, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (TokenizeRequest, {"prompt": "a", "model": 1}, "model"),
        (TokenizeRequest, {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        (TokenizeRequest, {"prompt": "a", "max_tokens": 1}, "max_tokens"),
        (DetokenizeRequest, {}, "tokens"),
        (DetokenizeRequest, {"tokens": "1"}, "tokens"),
        (DetokenizeRequest, {"tokens": [1, "2"]}, "tokens.1"),
        (DetokenizeRequest, {"tokens": [1.0]}, "tokens.0"),
        (DetokenizeRequest, {"tokens": [], "skip_special_tokens": True}, "skip_special_tokens"),
    ],
)
def test_tokens_bodies_that_are_refused(kind: type[Strict], fields: dict[str, Any], field: str) -> None:
    assert problem(json.dumps(fields), kind)[0] == field
