"""Refuses request bodies that are too large, before they are held in memory."""

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.cluster.ingress.http_errors import error_body

MAX_BODY_BYTES = 16 * 2**20
"""The default: many times the longest prompt of today's models."""


class BodyLimit:
    """ASGI middleware. Trusts `Content-Length` to refuse at once, and counts what really comes."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse(send)
            return
        num_bytes = 0
        is_answered = False

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
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
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        message = f"body: is larger than the {self._max_bytes} bytes that are allowed"
        content = json.dumps(error_body(message, kind="invalid_request_error", param="body")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),  # what is left of the body is not read
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class _TooLargeError(Exception):
    """More came than was announced, or nothing was announced."""
