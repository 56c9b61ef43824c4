"""Generations as HTTP responses: one body or server-sent events, for as long as the client is there."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, StreamingResponse
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagoda.cluster.ingress.answers import AnswerBuilder
from pagoda.cluster.ingress.fields import GenerationFields
from pagoda.cluster.ingress.http_errors import CLIENT_CLOSED_REQUEST, describe
from pagoda.cluster.ingress.request_log import AnswerCounts, record_of
from pagoda.cluster.ingress.service import Generation, TextOutput, merge
from pagoda.cluster.ingress.usage import Usage, usage

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, list[TextOutput]], None]


class ClientGoneError(Exception):
    """The client closed its connection before it was answered."""


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


async def respond(
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
        return Response(status_code=CLIENT_CLOSED_REQUEST)
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
) -> AsyncGenerator[bytes, None]:
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
        yield _event(describe(error)[1])
    yield b"data: [DONE]\n\n"


async def _from(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(body)


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
