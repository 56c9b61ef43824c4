"""An ingress's side of placement: hashes a prompt, asks the directory, and says what became of the request."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from google.protobuf.json_format import MessageToDict

from pagoda.cluster.directory.client import DirectoryClient, PlacementQuery
from pagoda.cluster.ingress.directory_api import DirectoryUnavailableError
from pagoda.worker.block_hash import BlockHash, HashChain, HashDomain
from pagoda.worker.types import Request, RequestId

_MAX_CHAINS = 4096
_LONG_PROMPT = 8192
"""Tokens from which on hashing takes milliseconds, which a thread of its own may spend."""


_REASONS = frozenset({"only", "prefix", "load", "spread", "given"})
"""A directory that says others must not make a series for each."""


class Placer:
    """Make and use it on one event loop."""

    def __init__(
        self,
        client: DirectoryClient,
        model: str,
        domain: Callable[[], HashDomain | None],
        *,
        on_placed: Callable[[str], None] = lambda _: None,
        is_routable: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`domain` tells what the workers' hashes begin with, once that is known; `is_routable` takes a boot id.

        `on_placed` gets each placement's reason, `none` where nobody answered.
        """
        self._on_placed = on_placed
        self._is_routable = is_routable
        self._client = client
        self._model = model
        self._domain = domain
        self._chains: dict[tuple[HashDomain, bytes, int], HashChain] = {}

    async def rank(self, request: Request, *, exclude: Collection[str] = ()) -> tuple[str, ...]:
        """Workers for a request, by boot id, the best first; empty if nobody can say. Reserves its load at the best."""
        domain = self._domain()
        if domain is None:
            return ()
        tokens = request.prompt_token_ids
        chain = self._chain(domain, request.salt, request.num_public_tokens)
        takes_hits = request.sampling.prompt_logprobs is None
        if not takes_hits:
            hashes: list[BlockHash] = []
        elif len(tokens) < _LONG_PROMPT:
            hashes = chain.blocks(tokens, domain.block_size)
        else:
            hashes = await asyncio.to_thread(chain.blocks, tokens, domain.block_size)
        query = PlacementQuery(
            request.request_id,
            self._model,
            hashes,
            len(tokens),
            num_samples=request.sampling.n,
            max_output_tokens=request.sampling.max_tokens or 0,
        )
        answer = await self._client.place(query, exclude=exclude)
        if answer is not None and (gone := [name for name in answer.ranked if not self._is_routable(name)]):
            # They are about to stop, or the directory has not heard yet: its load belongs where the request can go.
            answer = await self._client.place(query, exclude={*exclude, *gone}) or answer
        self._on_placed("none" if answer is None else answer.reason if answer.reason in _REASONS else "other")
        return () if answer is None else tuple(answer.ranked)

    async def stats(self) -> dict[str, Any]:
        """Implements `DirectoryView`."""
        stats = await self._client.stats()
        if stats is None:
            raise DirectoryUnavailableError("no directory answers")
        answer: dict[str, Any] = MessageToDict(
            stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return answer

    async def holders(
        self, token_ids: list[int], *, salt: bytes = b"", num_public_tokens: int = 0
    ) -> list[dict[str, Any]]:
        """Implements `DirectoryView`."""
        domain = self._domain()
        answer = None
        if domain is not None:
            hashes = self._chain(domain, salt, num_public_tokens).blocks(token_ids, domain.block_size)
            answer = await self._client.lookup(self._model, hashes)
        if domain is None or answer is None:
            raise DirectoryUnavailableError("no directory answers")
        return [
            {
                "worker_id": worker.worker_id,
                "num_tokens": worker.num_blocks * domain.block_size,
                "num_device_tokens": worker.num_device_blocks * domain.block_size,
                "num_predicted_tokens": worker.num_predicted_blocks * domain.block_size,
            }
            for worker in answer.workers
        ]

    def begun(self, request_id: RequestId) -> None:
        """Its worker has it."""
        self._client.begun(request_id)

    def gone(self, request_id: RequestId) -> None:
        """It has ended, or no worker has taken it. May be called after `begun`."""
        self._client.gone(request_id)

    def _chain(self, domain: HashDomain, salt: bytes, num_public_tokens: int) -> HashChain:
        key = (domain, salt, num_public_tokens)
        chain = self._chains.get(key)
        if chain is None:
            if len(self._chains) >= _MAX_CHAINS:
                self._chains.clear()
            chain = self._chains[key] = domain.chain(salt, num_public_tokens=num_public_tokens)
        return chain
