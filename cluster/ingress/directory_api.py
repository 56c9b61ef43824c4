"""What the prefix directory knows, for people: who holds what, and how requests were placed."""

from typing import Any, Protocol

from starlette.requests import Request as HttpRequest

from pagoda.cluster.ingress.schemas import TokenizeRequest
from pagoda.cluster.ingress.tokens_api import TokensApi
from pagoda.worker.errors import EngineStoppedError


class DirectoryUnavailableError(EngineStoppedError):
    """No directory answers."""


class DirectoryView(Protocol):
    """What an ingress can ask of its directory. Both raise `DirectoryUnavailableError`."""

    async def stats(self) -> dict[str, Any]:
        """`pagoda.v1.DirectoryStats` as JSON."""
        ...

    async def holders(self, token_ids: list[int]) -> list[dict[str, Any]]:
        """For each worker how many of these tokens it holds, from the first on, and where."""
        ...


class DirectoryApi:
    """The endpoints."""

    def __init__(self, view: DirectoryView | None, tokens: TokensApi) -> None:
        self._view = view
        self._tokens = tokens

    async def stats(self) -> dict[str, Any]:
        return await self._directory().stats()

    async def lookup(self, http: HttpRequest) -> dict[str, Any]:
        """The body is that of `/tokenize`."""
        directory = self._directory()
        tokens = await self._tokens.tokens_of(TokenizeRequest.model_validate_json(await http.body()))
        return {"num_tokens": len(tokens), "workers": await directory.holders(tokens)}

    def _directory(self) -> DirectoryView:
        if self._view is None:
            raise DirectoryUnavailableError("this service has no directory")
        return self._view
