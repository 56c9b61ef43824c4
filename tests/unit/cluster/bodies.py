"""Request bodies, parsed as the endpoints do, and what is wrong with bad ones."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pagoda.cluster.ingress.fields import Strict
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.schemas import ChatCompletionRequest, CompletionRequest

HELLO = [{"role": "user", "content": "Hello"}]


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
