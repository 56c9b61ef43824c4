"""The OpenAI HTTP API over an `InferenceService`. Only adapts: parses, answers, maps errors to statuses."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagoda import __version__
from pagoda.cluster.ingress.answers import AnswerBuilder, error_body
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.request_log import AnswerCounts, RequestLog, record_of
from pagoda.cluster.ingress.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    Usage,
    first_problem,
    usage,
)
from pagoda.cluster.ingress.service import Generation, InferenceService, TextOutput, merge
from pagoda.worker.errors import EngineStoppedError, InvalidRequestError, OverloadedError, PagodaError
from pagoda.worker.instruments import CONTENT_TYPE

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, list[TextOutput]], None]

MAX_PROMPTS = 1024
"""Prompts in one completions request."""
COMPLETIONS_MAX_TOKENS = 16
"""The completions API's default."""
RETRY_AFTER_S = 1
_CLIENT_CLOSED_REQUEST = 499


class UnknownModelError(InvalidRequestError):
    """The request asks for a model that is not served here."""


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_http_app(
    service: InferenceService,
    *,
    model_name: str,
    lifespan: Lifespan | None = None,
    metrics: IngressMetrics | None = None,
) -> FastAPI:
    """The application. `model_name` is what clients must put into `model`; `lifespan` is entered while it serves."""
    app = FastAPI(title="Pagoda", version=__version__, lifespan=lifespan)
    metrics = metrics or IngressMetrics(ingress="local")
    app.add_middleware(RequestLog, metrics=metrics)
    api = _Api(service, model_name, metrics)
    app.get("/health")(api.health)
    app.get("/metrics")(api.metrics)
    app.get("/v1/models")(api.list_models)
    app.get("/v1/models/{model:path}")(api.get_model)
    for path, endpoint, body in (
        ("/v1/chat/completions", api.chat_completions, ChatCompletionRequest),
        ("/v1/completions", api.completions, CompletionRequest),
    ):
        app.post(path, response_model=None, openapi_extra=_documented_body(body))(endpoint)
    for kind in (ValidationError, HTTPException, ClientDisconnect, PagodaError, Exception):
        app.exception_handler(kind)(_on_error)
    return app


class _Api:
    """The endpoints."""

    def __init__(self, service: InferenceService, model_name: str, metrics: IngressMetrics) -> None:
        self._service = service
        self._metrics = metrics
        self._model_name = model_name
        self._created = int(time.time())

    async def health(self) -> Response:
        return Response(status_code=200 if await self._service.is_healthy() else 503)

    async def metrics(self) -> Response:
        """Of this process and of all workers, in Prometheus' text format."""
        workers = await self._service.scrape_workers()
        return Response(self._metrics.exposition(workers), media_type=CONTENT_TYPE)

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def get_model(self, model: str) -> dict[str, Any]:
        self._check_model(model)
        return self._model()

    async def chat_completions(self, http: HttpRequest) -> Response:
        body = ChatCompletionRequest.model_validate_json(await http.body())
        self._check_model(body.model)
        body.check()
        sampling = body.sampling_params(default_max_tokens=None)
        prompt = await self._service.encode_chat([message.for_template() for message in body.messages])
        self._service.check(prompt, sampling)
        generation = self._service.generate(prompt, sampling, priority=body.priority or 0)
        return await _respond(http, body, [generation], AnswerBuilder("chat", self._model_name, sampling.n))

    async def completions(self, http: HttpRequest) -> Response:
        body = CompletionRequest.model_validate_json(await http.body())
        self._check_model(body.model)
        body.check()
        sampling = body.sampling_params(default_max_tokens=COMPLETIONS_MAX_TOKENS)
        if len(body.prompts) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"at most {MAX_PROMPTS} prompts in one request")
        prompts = [await self._service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        for prompt in prompts:
            self._service.check(prompt, sampling)
        generations = [self._service.generate(p, sampling, priority=body.priority or 0) for p in prompts]
        builder = AnswerBuilder("completions", self._model_name, sampling.n * len(prompts))
        return await _respond(http, body, generations, builder)

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise UnknownModelError("model", f"{name!r} is not served here; served: {self._model_name!r}")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pagoda",
            "max_model_len": self._service.limits.max_model_len,
        }


def _documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """Bodies are parsed here and not by FastAPI, so that any content type will do; `/docs` still shows them."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


class _Tally:
    """Counts the tokens of an answer."""

    def __init__(self, generations: list[Generation]) -> None:
        self._num_prompt_tokens = sum(generation.num_prompt_tokens for generation in generations)
        self._num_output_tokens = 0
        self._num_cached_tokens = [0] * len(generations)

    def add(self, position: int, output: TextOutput) -> None:
        self._num_output_tokens += output.num_new_tokens
        if output.index == 0:  # the other samples share its prompt
            self._num_cached_tokens[position] = output.num_cached_tokens

    def usage(self) -> Usage:
        return usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=sum(self._num_cached_tokens),
        )


async def _respond(
    http: HttpRequest, body: GenerationFields, generations: list[Generation], builder: AnswerBuilder
) -> Response:
    tally = _Tally(generations)
    record = record_of(http)
    record.follow(lambda: _counts(builder, tally))
    num_samples = generations[0].request.sampling.n
    pieces = merge(generations)
    try:
        # Until the first tokens are here, an error can still be a status.
        first = await _unless_client_goes(http, anext(pieces))
        record.first_token_arrives()
        if not body.stream:
            rest = _collect(first, pieces, builder, tally, num_samples)
            return JSONResponse(await _unless_client_goes(http, rest))
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except BaseException:
        await pieces.aclose()
        raise
    events = _events(first, pieces, builder, tally, num_samples, include_usage=body.include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _counts(builder: AnswerBuilder, tally: _Tally) -> AnswerCounts:
    counts = tally.usage()
    return AnswerCounts(
        answer_id=builder.answer_id,
        num_prompt_tokens=counts.prompt_tokens,
        num_cached_tokens=counts.prompt_tokens_details.cached_tokens,
        num_output_tokens=counts.completion_tokens,
        finish_reasons=[choice.finish_reason for choice in builder.choices],
    )


async def _collect(
    first: tuple[int, list[TextOutput]], pieces: Pieces, builder: AnswerBuilder, tally: _Tally, num_samples: int
) -> dict[str, Any]:
    async with aclosing(_from(first, pieces)) as batches:
        async for position, batch in batches:
            for output in batch:
                choice = builder.choices[position * num_samples + output.index]
                choice.text.append(output.text)
                choice.finish_reason = output.finish_reason
                tally.add(position, output)
    return builder.whole(tally.usage())


async def _events(
    first: tuple[int, list[TextOutput]],
    pieces: Pieces,
    builder: AnswerBuilder,
    tally: _Tally,
    num_samples: int,
    *,
    include_usage: bool,
) -> AsyncGenerator[str, None]:
    """Server-sent events. An error after the first one is an event, since the status is gone."""
    try:
        async with aclosing(_from(first, pieces)) as batches:
            async for position, batch in batches:
                for output in batch:
                    index = position * num_samples + output.index
                    builder.choices[index].finish_reason = output.finish_reason
                    tally.add(position, output)
                    if output.text or output.finish_reason is not None or not builder.choices[index].is_begun:
                        yield _event(builder.chunk(index, output.text))
        if include_usage:
            yield _event(builder.usage_chunk(tally.usage()))
    except Exception as error:  # noqa: BLE001  (whatever it is, the client must hear of it)
        yield _event(_describe(error)[1])
    yield "data: [DONE]\n\n"


async def _from(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before it was answered."""


async def _unless_client_goes(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGoneError` if the client disconnects first."""

    async def client_goes() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(client_goes())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


# -- errors --------------------------------------------------------------------------------------


async def _on_error(http: HttpRequest, error: Exception) -> Response:  # noqa: ARG001  (the handler's signature)
    status, body = _describe(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    if status in (429, 503):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    return JSONResponse(body, status_code=status, headers=headers)


def _describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error."""
    invalid = "invalid_request_error"
    match error:
        case ValidationError():
            param, message = first_problem(error.errors())
            return 400, error_body(message, kind=invalid, param=param)
        case UnknownModelError():
            return 404, error_body(str(error), kind=invalid, param=error.field, code="model_not_found")
        case InvalidRequestError():
            return 400, error_body(str(error), kind=invalid, param=error.field)
        case OverloadedError():
            return 429, error_body(str(error), kind="rate_limit_error", code="overloaded")
        case EngineStoppedError():
            return 503, error_body(str(error), kind="server_error", code="unavailable")
        case PagodaError():
            return 500, error_body(str(error), kind="server_error")
        case ClientDisconnect():
            return _CLIENT_CLOSED_REQUEST, error_body("the client went away", kind=invalid)
        case HTTPException():
            return error.status_code, error_body(str(error.detail), kind=invalid)
        case _:
            logger.error("unexpected error", exc_info=error)
            return 500, error_body("internal error", kind="server_error")
