"""What `/openapi.json` says of requests, from which `/docs` and client generators are made."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.cluster.ingress.http import build_http_app

FIELDS = {
    "/v1/chat/completions": {"messages", "max_completion_tokens", "top_logprobs", "temperature"},
    "/v1/completions": {"prompt", "echo", "max_tokens", "temperature"},
    "/tokenize": {"prompt", "messages"},
    "/detokenize": {"tokens"},
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    service: Any = SimpleNamespace(limits=None)
    return build_http_app(service, model_name="tiny").openapi()


def references(node: Any) -> list[str]:
    """All that are anywhere in a document."""
    if isinstance(node, dict):
        found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return found + [reference for value in node.values() for reference in references(value)]
    return [reference for item in node for reference in references(item)] if isinstance(node, list) else []


@pytest.mark.parametrize(("path", "fields"), FIELDS.items(), ids=FIELDS)
def test_body_is_documented_in_place(document: dict[str, Any], path: str, fields: set[str]) -> None:
    """Bodies are parsed by hand, so FastAPI knows nothing of them: they are written out, and lean on nothing else."""
    body = document["paths"][path]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert fields | {"model"} <= set(schema["properties"])
    assert body["required"]
    assert references(body) == []
    assert "$defs" not in schema


def test_parts_of_a_body_are_written_out(document: dict[str, Any]) -> None:
    """A message is a model of its own, which a client generator must find where it is used."""
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    message = body["content"]["application/json"]["schema"]["properties"]["messages"]["items"]
    assert {"role", "content"} <= set(message["properties"])


def test_no_reference_leads_nowhere(document: dict[str, Any]) -> None:
    for reference in references(document):
        node: Any = document
        for name in reference.removeprefix("#/").split("/"):
            node = node[name]
