"""How many prompt tokens one cache of all would have served: what any cluster's hits are measured against."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.target import LoadRequest, Target

BLOCK_TOKENS = 16
"""Hits are counted in whole blocks, as servers do."""


class PrefixCache:
    """Remembers blocks, each with its whole prefix: all that ever came, or those that were used last."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, max_blocks: int | None = None) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._chains: OrderedDict[int, None] = OrderedDict()
        """The least recently used first; of what was used together, the end before the beginning."""

    def num_cached(self, tokens: Sequence[int]) -> int:
        """Leading tokens that are there; the last one is always computed."""
        num_blocks = 0
        most = max(0, len(tokens) - 1) // self._block_tokens
        for chain in self._chain(tokens[: most * self._block_tokens]):
            if chain not in self._chains:
                break
            num_blocks += 1
        return num_blocks * self._block_tokens

    def add(self, tokens: Sequence[int]) -> None:
        for chain in reversed(self._chain(tokens)):
            self._chains[chain] = None
            self._chains.move_to_end(chain)
        while self._max_blocks is not None and len(self._chains) > self._max_blocks:
            self._chains.popitem(last=False)

    def _chain(self, tokens: Sequence[int]) -> list[int]:
        chains, chain = [], 0
        for begin in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            chain = hash((chain, tuple(tokens[begin : begin + self._block_tokens])))
            chains.append(chain)
        return chains


def ideal_cached_tokens(
    records: Sequence[RequestRecord],
    prompts: Mapping[tuple[int, int], Sequence[int]],
    *,
    max_blocks: int | None = None,
) -> dict[tuple[int, int], int]:
    """For each request its prompt tokens that an earlier request has had, or the answer before it in its session.

    `prompts` are token ids by session and turn. A prompt counts from when it is sent: those that come at the same time
    may share. What an answer was in tokens is read off the prompt that continues it. With `max_blocks` the cache keeps
    that many, the last used.
    """
    cache = PrefixCache(max_blocks=max_blocks)
    good = {(record.session, record.turn): record for record in records if record.error is None}
    begins = [(record.sent_s, 1, key) for key, record in good.items() if key in prompts]
    ends = [(record.end_s, 0, key) for key, record in good.items() if key in prompts]
    cached = {}
    for _, is_begin, key in sorted(begins + ends):
        tokens = prompts[key]
        if is_begin:
            cached[key] = cache.num_cached(tokens)
            cache.add(tokens)
        elif (continued := prompts.get((key[0], key[1] + 1))) is not None:
            cache.add(continued[: len(tokens) + good[key].num_output_tokens])
    return cached


async def tokenize_all(
    target: Target, requests: Mapping[tuple[int, int], LoadRequest], *, at_once: int = 8
) -> dict[tuple[int, int], list[int]] | None:
    """The prompts in tokens; None if the server does not tell."""
    prompts: dict[tuple[int, int], list[int]] = {}
    items = list(requests.items())
    for begin in range(0, len(items), at_once):
        batch = items[begin : begin + at_once]
        answers = await asyncio.gather(*(target.tokenize(request) for _, request in batch))
        for (key, _), tokens in zip(batch, answers, strict=True):
            if tokens is None:
                return None
            prompts[key] = tokens
    return prompts
