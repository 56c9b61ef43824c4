"""Names every HTTP request: by its `X-Request-Id`, or by an id of our own if it has none.

An `X-Request-Id` that cannot be used is refused: a server before us may already have promised to send it back.
"""

import re
import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.cluster.ingress.error_body import error_body

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
        given = Headers(scope=scope).get(HEADER)
        is_valid = given is None or _VALID.fullmatch(given) is not None
        request_id = given if given is not None and is_valid else uuid.uuid4().hex
        headers = {HEADER: request_id} if self._adds_header else {}
        scope.setdefault("state", {}).update({_ID: request_id, _HEADERS: headers})

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        if is_valid:
            await self._app(scope, receive, send_with_id)
        else:
            message = f"{HEADER}: must be 1 to 128 visible ASCII characters"
            body = error_body(message, kind="invalid_request_error", param=HEADER)
            await JSONResponse(body, status_code=400)(scope, receive, send_with_id)
