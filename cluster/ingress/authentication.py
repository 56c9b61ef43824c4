"""Whose an HTTP request is. Who has no key is refused before anything of the body is read.

Probes need no key: they come from load balancers, and tell nothing of anybody.
"""

import json
from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.cluster.ingress.http_errors import describe
from pagoda.cluster.ingress.tenant_registry import Authenticate, NotAllowedError, UnauthenticatedError
from pagoda.cluster.tenants import Tenant

OPEN_PATHS = ("/health", "/version")
_TENANT = "pagoda_tenant"
_HEADER = b"authorization"


def tenant_of(connection: HTTPConnection) -> Tenant:
    """Whose request it is that came through `Authentication`."""
    tenant: Tenant = connection.scope["state"][_TENANT]
    return tenant


class Authentication:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, authenticate: Authenticate, operator_paths: Collection[str] = ()) -> None:
        """`operator_paths` are for operators only."""
        self._app = app
        self._authenticate = authenticate
        self._operator_paths = frozenset(operator_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._authenticate(_authorization(scope))
            if scope["path"].rstrip("/") in self._operator_paths and not tenant.is_operator:
                raise NotAllowedError("this is for the operator's keys")
        except (UnauthenticatedError, NotAllowedError) as error:
            await _refuse(error, send)
            return
        scope.setdefault("state", {})[_TENANT] = tenant
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """The header's value. Of two, servers on the way might each have looked at another one."""
    values = [value for name, value in scope["headers"] if name == _HEADER]
    if len(values) > 1:
        raise UnauthenticatedError("there are several Authorization headers")
    return values[0].decode("latin-1") if values else None


async def _refuse(error: UnauthenticatedError | NotAllowedError, send: Send) -> None:
    status, body = describe(error)
    content = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),  # the body is not read
    ]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="pagoda"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
