"""What the prefix directory knows, for people: who holds what, and how requests were placed."""

from typing import Any, Protocol

from starlette.requests import Request as HttpRequest

from pagoda.cluster.ingress.authentication import tenant_of
from pagoda.cluster.ingress.schemas import LookupRequest
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.tokens_api import TokensApi
from pagoda.worker.errors import EngineStoppedError


class DirectoryUnavailableError(EngineStoppedError):
    """No directory answers."""


class DirectoryView(Protocol):
    """What an ingress can ask of its directory. Both raise `DirectoryUnavailableError`."""

    async def stats(self) -> dict[str, Any]:
        """`pagoda.v1.DirectoryStats` as JSON."""
        ...

    async def holders(
        self, token_ids: list[int], *, salt: bytes = b"", num_public_tokens: int = 0
    ) -> list[dict[str, Any]]:
        """For each worker how many of these tokens it holds, from the first on, and where.

        Of blocks that a request would find whose prompt they are, with this salt and as many public tokens.
        """
        ...


class DirectoryApi:
    """The endpoints."""

    def __init__(self, view: DirectoryView | None, tokens: TokensApi, service: InferenceService) -> None:
        self._view = view
        self._tokens = tokens
        self._service = service

    async def stats(self) -> dict[str, Any]:
        return await self._directory().stats()

    async def lookup(self, http: HttpRequest) -> dict[str, Any]:
        """What the caller's own requests would find. The body is that of `/tokenize`, with a `cache_salt`."""
        directory = self._directory()
        body = LookupRequest.model_validate_json(await http.body())
        salt = tenant_of(http).salt(body.cache_salt)
        tokens = await self._tokens.tokens_of(body)
        num_public_tokens = self._service.public_prefixes.num_public_tokens(tuple(tokens))
        workers = await directory.holders(tokens, salt=salt, num_public_tokens=num_public_tokens)
        return {"num_tokens": len(tokens), "workers": workers}

    def _directory(self) -> DirectoryView:
        if self._view is None:
            raise DirectoryUnavailableError("this service has no directory")
        return self._view
