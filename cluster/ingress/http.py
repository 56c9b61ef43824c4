"""The HTTP API as one application: which endpoint is where, and what every request passes through.

The endpoints are in `openai_api.py`, `tokens_api.py` and `server_api.py`.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from pagoda import __version__
from pagoda.cluster.ingress.authentication import Authentication
from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES, BodyLimit
from pagoda.cluster.ingress.directory_api import DirectoryApi, DirectoryView
from pagoda.cluster.ingress.http_errors import ERRORS, answer_error
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.openai_api import OpenAiApi
from pagoda.cluster.ingress.request_id import RequestIds
from pagoda.cluster.ingress.request_log import RequestLog
from pagoda.cluster.ingress.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LookupRequest,
    TokenizeRequest,
)
from pagoda.cluster.ingress.server_api import ServerApi
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.tenant_registry import Authenticate, anybody
from pagoda.cluster.ingress.tokens_api import TokensApi

_OPERATOR_PATHS = ("/metrics", "/directory/stats")
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_http_app(
    service: InferenceService,
    *,
    model_name: str,
    lifespan: Lifespan | None = None,
    metrics: IngressMetrics | None = None,
    server_sends_request_id: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    directory: DirectoryView | None = None,
    authenticate: Authenticate = anybody,
) -> FastAPI:
    """The application.

    `model_name` is what clients must put into `model`; `lifespan` is entered while it serves. A server that itself puts
    the request's id into the answer's header, as Ray Serve does, says so. `authenticate` says whose a request is.
    """
    app = FastAPI(title="Pagoda", version=__version__, lifespan=lifespan)
    metrics = metrics or IngressMetrics(ingress="local")
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(Authentication, authenticate=authenticate, operator_paths=_OPERATOR_PATHS)
    app.add_middleware(RequestIds, adds_header=not server_sends_request_id)
    app.add_middleware(RequestLog, metrics=metrics)
    api = OpenAiApi(service, model_name)
    server = ServerApi(service, metrics)
    tokens = TokensApi(service, api.check_model)
    directory_api = DirectoryApi(directory, tokens, service)
    app.get("/directory/stats")(directory_api.stats)
    app.get("/health")(server.health)
    app.head("/health", include_in_schema=False)(server.health)
    app.get("/metrics")(server.metrics)
    app.get("/version")(server.version)
    app.get("/v1/models")(api.list_models)
    app.get("/v1/models/{model:path}")(api.get_model)
    for path, endpoint, body in (
        ("/v1/chat/completions", api.chat_completions, ChatCompletionRequest),
        ("/v1/completions", api.completions, CompletionRequest),
        ("/tokenize", tokens.tokenize, TokenizeRequest),
        ("/detokenize", tokens.detokenize, DetokenizeRequest),
        ("/directory/lookup", directory_api.lookup, LookupRequest),
    ):
        app.post(path, response_model=None, openapi_extra=_documented_body(body))(endpoint)
    for kind in ERRORS:
        app.exception_handler(kind)(answer_error)
    return app


def _documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """Bodies are parsed here and not by FastAPI, so that any content type will do; `/docs` still shows them."""
    schema = model.model_json_schema()
    schemas = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                return inlined(schemas[reference.rpartition("/")[2]])
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(value) for value in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
