"""Refuses request bodies that are too large, before they are held in memory, and those that do not come in time."""

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.cluster.ingress.error_body import error_body

MAX_BODY_BYTES = 4 * 2**20
"""The default: a million tokens of text. To read a body holds the interpreter's lock, at worst for 0.3 s a MiB."""
BODY_DEADLINE_S = 60.0
"""For all of a body to come."""


class BodyLimit:
    """ASGI middleware. Trusts `Content-Length` to refuse at once, and counts what really comes."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, deadline_s: float = BODY_DEADLINE_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse_size(send)
            return
        num_bytes = 0
        is_complete = is_answered = False
        deadline = asyncio.get_running_loop().time() + self._deadline_s

        async def counted() -> Message:
            nonlocal num_bytes, is_complete
            async with asyncio.timeout_at(None if is_complete else deadline):
                message = await receive()
            is_complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise _TooLargeError
            return message

        async def watched(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLargeError:
            if not is_answered:
                await self._refuse_size(send)
        except TimeoutError:
            if is_complete or is_answered:
                raise
            await self._refuse(send, 408, f"body: has not come within {self._deadline_s:g} s")

    async def _refuse_size(self, send: Send) -> None:
        await self._refuse(send, 413, f"body: is larger than the {self._max_bytes} bytes that are allowed")

    async def _refuse(self, send: Send, status: int, message: str) -> None:
        content = json.dumps(error_body(message, kind="invalid_request_error", param="body")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),  # what is left of the body is not read
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class _TooLargeError(Exception):
    """More came than was announced, or nothing was announced."""
