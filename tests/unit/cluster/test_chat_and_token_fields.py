"""Fields that say how a chat becomes a prompt, and the bodies of `/tokenize` and `/detokenize`."""

import json
from typing import Any

import pytest
from bodies import HELLO, chat, problem

from pagoda.cluster.ingress.fields import Strict
from pagoda.cluster.ingress.schemas import DetokenizeRequest, TokenizeRequest
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import InvalidRequestError

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
