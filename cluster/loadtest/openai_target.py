"""A server with the OpenAI HTTP API, whoever made it. Nothing it answers may stop a load test."""

import asyncio
import errno
import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from pagoda.cluster.chat_client import authorization, root_url
from pagoda.cluster.loadtest.target import (
    TOKENIZE_TIMEOUT_S,
    Answer,
    LoadRequest,
    SendError,
    TargetError,
    check_counts,
)
from pagoda.cluster.openai_stream import (
    EventSplitter,
    NotAnEventError,
    count,
    may_begin_event,
    parse_event,
    problem_with_type,
)

_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
"""Shorter than servers': one that closes a connection just when it is used again would look like a failure."""
_STALE_S = 0.25
"""A kept connection that breaks within this was closed before the request came; later, the request has failed."""
_EOF_WAIT_S = 0.05
_DETAIL_WAIT_S = 0.3
_MAX_EVENT_BYTES = 8 * 2**20
_MAX_DETAIL_BYTES = 2_000
_PIECES_PER_TOKEN, _MORE_PIECES, _MORE_EVENTS = 8, 64, 10_000
"""No server sends so many pieces; one that does would never end."""


class OpenAITarget:
    """Streams chats from `/v1/chat/completions` and everything else from `/v1/completions`.

    `url` is the server's, with or without `/v1`. `fields` go into every body. `tls` says whose
    certificates are believed. `clock` gives seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 600.0,
        fields: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = root_url(url)
        self.model = model
        self._fields = fields or {}
        self._timeout_s = timeout_s
        self._clock = clock
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=True if tls is None else tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=authorization(api_key),
            read_bufsize=2**20,
            trace_configs=[tracing],
        )
        self._http_anew = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=True if tls is None else tls),
            timeout=self._http.timeout,
            headers=authorization(api_key),
            read_bufsize=2**20,
        )
        """Over a new connection each."""
        self._ending: set[asyncio.Task[None]] = set()
        self._being_read: WeakKeyDictionary[asyncio.BaseProtocol, aiohttp.StreamReader] = WeakKeyDictionary()
        """What the answer of each connection is read from."""

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        await self._http.close()
        await self._http_anew.close()

    async def models(self) -> list[str]:
        """Names of what is served. Raises `TargetError`."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S), self._http.get(f"{self.url}/v1/models") as response:
                if response.status != 200:
                    raise TargetError(f"{self.url}/v1/models answers {response.status}")
                names = [str(model["id"]) for model in json.loads(await response.read())["data"]]
                return [name.encode(errors="replace").decode() for name in names]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TargetError(f"no server at {self.url}: {str(error) or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TargetError(f"{self.url} does not answer as an OpenAI API does") from error

    async def send(self, request: LoadRequest, answer: Answer) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.messages:
            path, body["messages"] = "chat/completions", list(request.messages)
        else:
            path, body["prompt"] = "completions", request.prompt
        most_pieces = _PIECES_PER_TOKEN * request.max_tokens + _MORE_PIECES
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._post(f"{self.url}/v1/{path}", body, answer)
                try:
                    self._watch_end(response)
                    await self._read(response, answer, most_pieces)
                    check_counts(answer, request.max_tokens)
                except BaseException:
                    response.close()
                    raise
                ending = asyncio.create_task(_end(response))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
        except aiohttp.ServerTimeoutError as error:
            raise SendError("refused", f"no connection within {_CONNECT_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise SendError("timeout", f"not answered within {self._timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            is_ours = error.os_error.errno in (errno.EMFILE, errno.ENFILE)
            raise SendError("client" if is_ours else "refused", str(error)) from error
        except (aiohttp.ClientResponseError, aiohttp.InvalidURL, ValueError) as error:
            raise SendError("garbage", f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            is_content = isinstance(error.__cause__, aiohttp.http_exceptions.ContentEncodingError)
            raise SendError("garbage" if is_content else "reset", f"{type(error).__name__}: {error}") from error

    async def _post(self, url: str, body: dict[str, Any], answer: Answer) -> aiohttp.ClientResponse:
        """Sent once more, and counted, if a kept connection turns out to be closed, as servers may do at any time."""
        connection, sent_s = _Connection(), self._clock()
        try:
            return await self._http.post(url, json=body, allow_redirects=False, trace_request_ctx=connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not connection.is_reused or self._clock() - sent_s > _STALE_S:
                raise
        answer.num_resent += 1
        return await self._http_anew.post(url, json=body, allow_redirects=False)

    def _watch_end(self, response: aiohttp.ClientResponse) -> None:
        """Let a reader know of bytes that are no HTTP: aiohttp closes the connection then, but tells nobody."""
        if response.connection is None or (protocol := response.connection.protocol) is None:
            return  # all of it is here
        is_known = protocol in self._being_read
        self._being_read[protocol] = response.content
        if is_known or protocol.closed is None:
            return

        def closed(end: asyncio.Future[None]) -> None:
            end.exception()  # what it says, aiohttp has told the reader
            content = self._being_read.pop(protocol)
            if not content.is_eof() and content.exception() is None:
                content.set_exception(ValueError("bytes that are no HTTP"))

        protocol.closed.add_done_callback(closed)

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, most_pieces: int) -> None:
        if response.status != 200:
            raise SendError(f"http_{response.status}", await _detail(response))
        splitter, is_done, num_events = EventSplitter(), False, 0
        while not is_done and (data := await response.content.readany()):
            now = self._clock()
            for event in splitter.feed(data):
                num_events += 1
                if is_done := take_event(event, answer, now):
                    break
            if len(splitter.rest) > _MAX_EVENT_BYTES:
                raise SendError("garbage", f"an event of more than {_MAX_EVENT_BYTES} bytes")
            if len(answer.piece_s) > most_pieces or num_events > most_pieces + _MORE_EVENTS:
                raise SendError("garbage", "goes on and on beyond max_tokens")
        is_rubbish = False
        if splitter.rest.strip() and not is_done:
            try:
                parse_event(splitter.rest)
                is_done = take_event(splitter.rest, answer, self._clock())
            except NotAnEventError:  # cut in the middle, if it is anything
                is_rubbish = not answer.piece_s and not may_begin_event(splitter.rest)
        answer.end_s = self._clock()
        if answer.finish_reason is None:
            if not answer.piece_s and (problem := problem_with_type(response.headers.get("Content-Type"))):
                raise SendError("garbage", problem)
            is_cut = not is_rubbish and (not is_done or answer.piece_s)
            raise SendError("cut" if is_cut else "garbage", "ended without a finish reason")

    async def tokenize(self, request: LoadRequest) -> list[int] | None:
        if not request.messages and not isinstance(request.prompt, str):
            return list(request.prompt)
        body: dict[str, Any] = {"model": self.model}
        body |= {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
        try:
            async with (
                asyncio.timeout(min(self._timeout_s, TOKENIZE_TIMEOUT_S)),
                self._http.post(f"{self.url}/tokenize", json=body) as response,
            ):
                if response.status != 200:
                    return None
                tokens = json.loads(await response.read())["tokens"]
                return [count(token) for token in tokens]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            return None


@dataclass(slots=True)
class _Connection:
    """What a request was sent over."""

    is_reused: bool = False


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    if isinstance(context.trace_request_ctx, _Connection):
        context.trace_request_ctx.is_reused = True


async def _detail(response: aiohttp.ClientResponse) -> str:
    """What a refusal says, if it comes: the status alone says enough."""
    try:
        async with asyncio.timeout(_DETAIL_WAIT_S):
            return (await response.content.read(_MAX_DETAIL_BYTES)).decode(errors="replace")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"its body does not come: {type(error).__name__}"


async def _end(response: aiohttp.ClientResponse) -> None:
    """Wait a little for the end behind `[DONE]`, so that the connection can be used again."""
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(_EOF_WAIT_S):
            while not response.content.at_eof():
                await response.content.readany()
    response.release()


def take_event(event: bytes, answer: Answer, now: float) -> bool:
    """Put a server-sent event into `answer`; whether it says that the stream is done. Raises `SendError`."""
    try:
        parsed = parse_event(event)
    except NotAnEventError as error:
        raise SendError("garbage", str(error)) from error
    if parsed.error is not None:
        raise SendError("error_event", parsed.error)
    if (usage := parsed.usage) is not None:
        answer.num_prompt_tokens = usage.num_prompt_tokens
        answer.num_output_tokens = usage.num_output_tokens
        answer.num_cached_tokens = usage.num_cached_tokens
    text = parsed.reasoning + parsed.text
    if text:
        answer.text.append(text)
    if text or (parsed.finish_reason and not answer.piece_s):  # an answer may be one token without text
        answer.piece_s.append(now)
    answer.finish_reason = parsed.finish_reason or answer.finish_reason
    return parsed.is_done
