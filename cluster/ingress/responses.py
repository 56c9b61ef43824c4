"""Generations as HTTP responses: one body or server-sent events, for as long as the client is there."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda.cluster.ingress.answers import AnswerBuilder
from pagoda.cluster.ingress.fields import GenerationFields
from pagoda.cluster.ingress.generation import Generation, TextOutput, merge
from pagoda.cluster.ingress.http_errors import CLIENT_CLOSED_REQUEST, describe
from pagoda.cluster.ingress.request_log import AnswerCounts, record_of
from pagoda.cluster.ingress.usage import Usage, usage

T = TypeVar("T")
Piece = tuple[int, list[TextOutput]]
"""New outputs and the position of their prompt."""
Pieces = AsyncGenerator[Piece, None]


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
        first = await _unless_client_goes(http.receive, anext(pieces))
        record.tokens_arrive()
        if not body.stream:
            return await _unless_client_goes(http.receive, _collect(first, pieces, builder, tally))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        await pieces.aclose()
        raise
    return _EventStream(first, pieces, builder, tally, body)


def _counts(builder: AnswerBuilder, tally: _Tally) -> AnswerCounts:
    counts = tally.usage()
    return AnswerCounts(
        answer_id=builder.answer_id,
        num_prompt_tokens=counts.prompt_tokens,
        num_cached_tokens=counts.prompt_tokens_details.cached_tokens,
        num_output_tokens=counts.completion_tokens,
        finish_reasons=[choice.finish_reason for choice in builder.choices],
    )


async def _collect(first: Piece, pieces: Pieces, builder: AnswerBuilder, tally: _Tally) -> JSONResponse:
    async with aclosing(pieces):
        _take(first, builder, tally)
        async for piece in pieces:
            _take(piece, builder, tally)
    # With log probabilities an answer may be megabytes, and the event loop must stay free.
    return await asyncio.to_thread(lambda: JSONResponse(builder.whole(tally.usage())))


def _take(piece: Piece, builder: AnswerBuilder, tally: _Tally) -> None:
    position, outputs = piece
    for output in outputs:
        builder.add(position, output)
        tally.add(position, output)


class _EventStream(Response):
    """Server-sent events. An error after the first one is an event, since the status is gone.

    Starlette's own class takes three steps more for each token, between generators.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: Piece, pieces: Pieces, builder: AnswerBuilder, tally: _Tally, body: GenerationFields
    ) -> None:
        # Not the base class's: what it sends has a length.
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache"})
        self._first = first
        self._pieces = pieces
        self._builder = builder
        self._tally = tally
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (ASGI's signature)
        async with aclosing(self._pieces):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(ClientGoneError):
                await _unless_client_goes(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        try:
            await self._send_piece(self._first, send)
            async for piece in self._pieces:
                await self._send_piece(piece, send)
            if self._body.include_usage:
                await _send_event(self._builder.usage_chunk(self._tally.usage()), send)
        except Exception as error:  # noqa: BLE001  (whatever it is, the client must hear of it)
            await _send_event(describe(error)[1], send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send_piece(self, piece: Piece, send: Send) -> None:
        position, outputs = piece
        builder, tally = self._builder, self._tally
        for output in outputs:
            index = builder.add(position, output)
            tally.add(position, output)
            if builder.has_news(index):
                usage_so_far = tally.usage() if self._body.continuous_usage else None
                await _send_event(builder.chunk(index, usage_so_far), send)


async def _send_event(body: dict[str, Any], send: Send) -> None:
    await send({"type": "http.response.body", "body": b"data: %b\n\n" % to_json(body), "more_body": True})


async def _unless_client_goes(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGoneError` if the client disconnects first."""

    async def client_goes() -> None:
        while (await receive())["type"] != "http.disconnect":
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
