"""A server with the OpenAI HTTP API, whoever made it. Nothing it answers may stop a load test."""

import asyncio
import errno
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from pagoda.cluster.chat_client import root_url
from pagoda.cluster.loadtest.target import TOKENIZE_TIMEOUT_S, Answer, LoadRequest, SendError, TargetError

_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
"""Shorter than servers': one that closes a connection just when it is used again would look like a failure."""
_STALE_S = 0.25
"""A kept connection that breaks within this was closed before the request came; later, the request has failed."""
_EOF_WAIT_S = 0.05
_MAX_EVENT_BYTES = 8 * 2**20
_MAX_DETAIL_BYTES = 2_000
_PIECES_PER_TOKEN, _MORE_PIECES, _MORE_EVENTS = 8, 64, 10_000
"""No server sends so many pieces; one that does would never end."""


class OpenAITarget:
    """Streams chats from `/v1/chat/completions` and everything else from `/v1/completions`.

    `url` is the server's, with or without `/v1`. `fields` go into every body. `clock` gives seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
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
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            read_bufsize=2**20,
            trace_configs=[tracing],
        )
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        await self._http.close()

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
        if request.messages:
            path, body["messages"] = "chat/completions", list(request.messages)
        else:
            path, body["prompt"] = "completions", request.prompt
        most_pieces = _PIECES_PER_TOKEN * request.max_tokens + _MORE_PIECES
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._post(f"{self.url}/v1/{path}", body, answer)
                try:
                    await self._read(response, answer, most_pieces)
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
        for may_repeat in (True, False):
            connection, sent_s = _Connection(), self._clock()
            try:
                return await self._http.post(url, json=body, allow_redirects=False, trace_request_ctx=connection)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                was_stale = connection.is_reused and self._clock() - sent_s <= _STALE_S
                if not (may_repeat and was_stale):
                    raise
                answer.num_resent += 1
        raise AssertionError("the second time returns or raises")

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, most_pieces: int) -> None:
        if response.status != 200:
            detail = await response.content.read(_MAX_DETAIL_BYTES)
            raise SendError(f"http_{response.status}", detail.decode(errors="replace"))
        rest, is_done, parts, num_events = b"", False, response.content, 0
        while not is_done and (data := await parts.readany()):
            now = self._clock()
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                is_done = take_event(event, answer, now) or is_done
            if len(rest) > _MAX_EVENT_BYTES:
                raise SendError("garbage", f"an event of more than {_MAX_EVENT_BYTES} bytes")
            num_events += len(events)
            if len(answer.piece_s) > most_pieces or num_events > most_pieces + _MORE_EVENTS:
                raise SendError("garbage", "goes on and on beyond max_tokens")
        if rest.strip() and not is_done:
            is_done = take_event(rest, answer, self._clock())
        answer.end_s = self._clock()
        if answer.finish_reason is None:
            raise SendError("cut" if not is_done or answer.piece_s else "garbage", "ended without a finish reason")

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
                return [_count(token) for token in tokens]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            return None


@dataclass(slots=True)
class _Connection:
    """What a request was sent over."""

    is_reused: bool = False


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    if isinstance(context.trace_request_ctx, _Connection):
        context.trace_request_ctx.is_reused = True


async def _end(response: aiohttp.ClientResponse) -> None:
    """Wait a little for the end behind `[DONE]`, so that the connection can be used again."""
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(_EOF_WAIT_S):
            while not response.content.at_eof():
                await response.content.readany()
    response.release()


def take_event(event: bytes, answer: Answer, now: float) -> bool:
    """Put a server-sent event into `answer`; whether it says that the stream is done. Raises `SendError`."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    if not data:
        if event.strip() and not all(line[:1] == b":" or b":" in line for line in event.strip().split(b"\n")):
            raise SendError("garbage", f"no event: {event[:200]!r}")
        return False
    if data == b"[DONE]":
        return True
    try:
        chunk = json.loads(data)
        if (error := chunk.get("error")) is not None:
            raise SendError("error_event", json.dumps(error))
        if (usage := chunk.get("usage")) is not None:
            answer.num_prompt_tokens = _count(usage["prompt_tokens"])
            num_output = usage.get("completion_tokens")
            answer.num_output_tokens = None if num_output is None else _count(num_output)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            answer.num_cached_tokens = None if cached is None else _count(cached)
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            text = choice["text"] if delta is None else delta.get("content") or delta.get("reasoning_content")
            reason = choice.get("finish_reason")
            if not isinstance(text, str | None) or not isinstance(reason, str | None):
                raise TypeError("text and finish_reason are strings")
            if text:
                answer.text.append(text)
            if text or (reason and not answer.piece_s):  # an answer may be one token without text
                answer.piece_s.append(now)
            if reason:
                answer.finish_reason = reason
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SendError("garbage", f"{type(error).__name__} in {data[:200]!r}") from error
    return False


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r} is no count")
    return value
