"""Every field of every body, those to come too: what is of no type or below every range is refused by its name."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from pagoda.cluster.ingress.fields import GenerationFields, Strict
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import MAX_MESSAGE, MAX_QUOTED

GOOD: dict[type[Strict], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"model": "m", "prompt": "Hello"},
    TokenizeRequest: {"prompt": "Hello"},
    DetokenizeRequest: {"tokens": [1]},
}
NO_VALUE = [[[{"none": "such"}]]]
"""Of no field's type."""
FIELDS = [(kind, name) for kind in GOOD for name in kind.model_fields]


def numbers() -> Iterator[tuple[type[Strict], str, float]]:
    """Numeric fields, each with numbers that none of them takes."""
    for kind, name in FIELDS:
        types = get_args(kind.model_fields[name].annotation)
        if float in types:
            yield from ((kind, name, value) for value in (-1e300, float("nan"), float("inf"), float("-inf")))
        if int in types:
            yield kind, name, -(10**30)


def refusal(kind: type[Strict], body: dict[str, Any]) -> tuple[str | None, str]:
    """(field, message) of a body that must be refused, wherever it is."""
    try:
        read = kind.model_validate_json(json.dumps(body))
        read.check()  # type: ignore[attr-defined]
        if isinstance(read, GenerationFields):
            read.sampling_params(default_max_tokens=None)
    except ValidationError as error:
        return first_problem(error.errors())
    except InvalidRequestError as error:
        return error.field, str(error)
    pytest.fail(f"is accepted: {body}")


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_wrong_type_is_refused_by_name(kind: type[Strict], name: str) -> None:
    field, message = refusal(kind, GOOD[kind] | {name: NO_VALUE})
    assert field is not None
    assert field.split(".")[0] == name
    assert message.startswith(f"{field}: ")


@pytest.mark.parametrize(("kind", "name", "value"), list(numbers()))
def test_number_out_of_every_range_is_refused_by_name(kind: type[Strict], name: str, value: float) -> None:
    field, message = refusal(kind, GOOD[kind] | {name: value})
    assert field == name
    assert message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x" * 10_000] * 17},
        {"stop_token_ids": [-1] * 100_000},
        {"seed": 10**4000},
        {"x" * 100_000: 1},
        {"logit_bias": {"x" * 100_000: "y"}},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_refusal_of_megabytes_is_short(fields: dict[str, Any]) -> None:
    """It says the client's own words back, but not all 16 MiB of them."""
    field, message = refusal(CompletionRequest, GOOD[CompletionRequest] | fields)
    assert field is not None
    assert len(field) <= MAX_QUOTED
    assert len(message) <= MAX_QUOTED + MAX_MESSAGE
    assert "…" in message
