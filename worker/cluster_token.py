"""What the processes of one cluster show each other on their gRPC calls."""

import hmac
from typing import Any

import grpc

_KEY = "authorization"


class ClusterToken:
    """A bearer token, or none where nothing is asked for."""

    def __init__(self, token: str | None) -> None:
        self._value = None if token is None else f"Bearer {token}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For the calls of a client."""
        return () if self._value is None else ((_KEY, self._value),)

    async def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """In a server: end the call with UNAUTHENTICATED unless it shows the token."""
        if self._value is None:
            return
        shown = dict(context.invocation_metadata() or ()).get(_KEY, "")
        if not hmac.compare_digest(str(shown).encode(), self._value.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{_KEY}: wrong or missing token")
