"""Names every HTTP request: by its `X-Request-Id` if that is usable, else by an id of our own."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_VALID = re.compile(r"[!-~]{1,128}")
"""Visible ASCII: it goes into headers, logs and answers."""
_ID, _HEADERS = "pagoda_request_id", "pagoda_request_id_headers"


def request_id_of(connection: HTTPConnection) -> str:
    """The id of a request that came through `RequestIds`."""
    request_id: str = connection.scope["state"][_ID]
    return request_id


def request_id_headers(connection: HTTPConnection) -> dict[str, str]:
    """For answers that are made outside of all middleware, as those to unexpected errors are."""
    headers: dict[str, str] = connection.scope["state"][_HEADERS]
    return headers


class RequestIds:
    """ASGI middleware: gives each request its id, and each answer the header that says it."""

    def __init__(self, app: ASGIApp, *, adds_header: bool = True) -> None:
        """`adds_header` false leaves the header to a server that itself sends back what it got or drew."""
        self._app = app
        self._adds_header = adds_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _VALID.fullmatch(given) else uuid.uuid4().hex
        headers = {HEADER: request_id} if self._adds_header else {}
        scope.setdefault("state", {}).update({_ID: request_id, _HEADERS: headers})

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        await self._app(scope, receive, send_with_id)
