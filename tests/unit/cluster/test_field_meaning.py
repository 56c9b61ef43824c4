"""What the fields of a good body mean, and which values are refused."""

import json
from typing import Any

import pytest
from bodies import HELLO, chat, completion, problem

from pagoda.cluster.ingress.schemas import CompletionRequest
from pagoda.cluster.ingress.usage import usage
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.types import SamplingParams


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
