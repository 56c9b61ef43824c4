"""The OpenAI HTTP API over an `InferenceService`. Only adapts: parses, answers, maps errors to statuses."""

import asyncio
import hashlib
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
from pagoda.cluster.ingress.answers import AnswerBuilder, AnswerOptions, Endpoint, Prompt, error_body
from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES, BodyLimit
from pagoda.cluster.ingress.fields import GenerationFields
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.request_id import RequestIds, request_id_headers, request_id_of
from pagoda.cluster.ingress.request_log import AnswerCounts, RequestLog, record_of
from pagoda.cluster.ingress.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagoda.cluster.ingress.service import Generation, InferenceService, TextOutput, merge, prompt_only
from pagoda.cluster.ingress.tokens_api import TokensApi
from pagoda.cluster.ingress.usage import Usage, usage
from pagoda.worker.errors import EngineStoppedError, InvalidRequestError, OverloadedError, PagodaError
from pagoda.worker.instruments import CONTENT_TYPE
from pagoda.worker.types import SamplingParams

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
    server_sends_request_id: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application.

    `model_name` is what clients must put into `model`; `lifespan` is entered while it serves. A server that itself puts
    the request's id into the answer's header, as Ray Serve does, says so.
    """
    app = FastAPI(title="Pagoda", version=__version__, lifespan=lifespan)
    metrics = metrics or IngressMetrics(ingress="local")
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(RequestLog, metrics=metrics)
    app.add_middleware(RequestIds, adds_header=not server_sends_request_id)
    api = _Api(service, model_name, metrics)
    tokens = TokensApi(service, api.check_model)
    app.get("/health")(api.health)
    app.get("/metrics")(api.metrics)
    app.get("/version")(api.version)
    app.get("/v1/models")(api.list_models)
    app.get("/v1/models/{model:path}")(api.get_model)
    for path, endpoint, body in (
        ("/v1/chat/completions", api.chat_completions, ChatCompletionRequest),
        ("/v1/completions", api.completions, CompletionRequest),
        ("/tokenize", tokens.tokenize, TokenizeRequest),
        ("/detokenize", tokens.detokenize, DetokenizeRequest),
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
        served = f"{model_name} {service.limits}"
        self._fingerprint = f"pagoda-{__version__}-{hashlib.sha256(served.encode()).hexdigest()[:8]}"

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def health(self) -> Response:
        return Response(status_code=200 if await self._service.is_healthy() else 503)

    async def metrics(self) -> Response:
        """Of this process and of all workers, in Prometheus' text format."""
        workers = await self._service.scrape_workers()
        return Response(self._metrics.exposition(workers), media_type=CONTENT_TYPE)

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def get_model(self, model: str) -> dict[str, Any]:
        self.check_model(model)
        return self._model()

    async def chat_completions(self, http: HttpRequest) -> Response:
        body = ChatCompletionRequest.model_validate_json(await http.body())
        self.check_model(body.model)
        body.check()
        sampling = body.sampling_params(default_max_tokens=None)
        options = body.chat_options()
        prompt = await self._service.encode_chat([message.for_template() for message in body.messages], options)
        self._service.check(prompt, sampling)
        generation = self._service.generate(
            prompt, sampling, priority=body.priority or 0, request_id=request_id_of(http)
        )
        prompts = [Prompt(prompt, body.messages[-1].text if body.echo else None)]
        builder = self._builder("chat", http, body, prompts, sampling, body.num_logprobs)
        return await _respond(http, body, [generation], builder)

    async def completions(self, http: HttpRequest) -> Response:
        body = CompletionRequest.model_validate_json(await http.body())
        self.check_model(body.model)
        body.check()
        sampling = body.sampling_params(default_max_tokens=COMPLETIONS_MAX_TOKENS)
        if len(body.prompts) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"at most {MAX_PROMPTS} prompts in one request")
        room = self._service.limits.max_num_seqs + self._service.limits.max_num_waiting
        if len(body.prompts) * sampling.n > room:
            raise InvalidRequestError(
                "prompt", f"{len(body.prompts)} prompts with n={sampling.n}: at most {room} samples"
            )
        prompts = [await self._encode(body, prompt) for prompt in body.prompts]
        for prompt in prompts:
            self._service.check(prompt, sampling)
        shown = [
            Prompt(tokens, await self._echo(body, prompt, tokens))
            for prompt, tokens in zip(body.prompts, prompts, strict=True)
        ]
        generations = [
            self._service.generate(p, sampling, priority=body.priority or 0, request_id=request_id_of(http))
            for p in prompts
        ]
        if body.is_prompt_only:
            generations = [prompt_only(generation) for generation in generations]
        builder = self._builder("completions", http, body, shown, sampling, body.logprobs)
        return await _respond(http, body, generations, builder)

    async def _encode(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._service.encode(prompt, add_special_tokens=body.add_special_tokens in (None, True))

    async def _echo(self, body: CompletionRequest, prompt: str | list[int], tokens: list[int]) -> str | None:
        if not body.echo:
            return None
        if isinstance(prompt, str):
            return prompt
        return await self._service.decode(tokens, skip_special_tokens=body.skip_special_tokens in (None, True))

    def _builder(
        self,
        endpoint: Endpoint,
        http: HttpRequest,
        body: GenerationFields,
        prompts: list[Prompt],
        sampling: SamplingParams,
        num_logprobs: int | None,
    ) -> AnswerBuilder:
        return AnswerBuilder(
            endpoint,
            request_id=request_id_of(http),
            model_name=self._model_name,
            fingerprint=self._fingerprint,
            prompts=prompts,
            num_samples=sampling.n,
            vocabulary=self._service.vocabulary,
            options=AnswerOptions(
                num_logprobs=num_logprobs,
                num_prompt_logprobs=body.prompt_logprobs,
                token_ids=bool(body.return_token_ids),
                skip_special_tokens=sampling.skip_special_tokens,
            ),
        )

    def check_model(self, name: str) -> None:
        """Raise `UnknownModelError` unless `name` is served here."""
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
    schema = model.model_json_schema()
    schemas = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                return inlined(schemas[reference.rpartition("/")[2]])
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(value) for value in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}


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
    pieces = merge(generations)
    try:
        # Until the first tokens are here, an error can still be a status.
        first = await _unless_client_goes(http, anext(pieces))
        record.tokens_arrive()
        if not body.stream:
            return await _unless_client_goes(http, _collect(first, pieces, builder, tally))
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except BaseException:
        await pieces.aclose()
        raise
    events = _events(first, pieces, builder, tally, body)
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
    first: tuple[int, list[TextOutput]], pieces: Pieces, builder: AnswerBuilder, tally: _Tally
) -> JSONResponse:
    async with aclosing(_from(first, pieces)) as batches:
        async for position, batch in batches:
            for output in batch:
                builder.add(position, output)
                tally.add(position, output)
    # With log probabilities an answer may be megabytes, and the event loop must stay free.
    return await asyncio.to_thread(lambda: JSONResponse(builder.whole(tally.usage())))


async def _events(
    first: tuple[int, list[TextOutput]],
    pieces: Pieces,
    builder: AnswerBuilder,
    tally: _Tally,
    body: GenerationFields,
) -> AsyncGenerator[str, None]:
    """Server-sent events. An error after the first one is an event, since the status is gone."""
    try:
        async with aclosing(_from(first, pieces)) as batches:
            async for position, batch in batches:
                for output in batch:
                    index = builder.add(position, output)
                    tally.add(position, output)
                    if builder.has_news(index):
                        yield _event(builder.chunk(index, tally.usage() if body.continuous_usage else None))
        if body.include_usage:
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


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    status, body = _describe(error)
    headers = request_id_headers(http)
    if isinstance(error, HTTPException):
        headers = headers | dict(error.headers or {})
    if status in (429, 503):
        headers = headers | {"Retry-After": str(RETRY_AFTER_S)}
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
