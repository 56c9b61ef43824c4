"""How much of a prompt the cache holds, and why not more. Standard library only.

A prefix is found if every group of layers can serve it: one with full attention needs all its blocks, one with a window
those just before its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pagoda.worker.block_hash import BlockHash
from pagoda.worker.block_pool import Block, BlockKey, BlockPool
from pagoda.worker.kv_spec import SPARE_BLOCKS, blocks_before


class MissReason(StrEnum):
    """Why a prompt token was not found in the cache."""

    EVICTED = "evicted"
    """Its block was cached until one of the latest evictions, of which the pool remembers as many as it has blocks."""
    NEVER_SEEN = "never_seen"
    """Its block is neither cached nor among those."""
    WINDOW = "window"
    """The layers with full attention have it, but those with a window lack what lies before the end of the prefix."""
    OPEN_BLOCK = "open_block"
    """No lookup could find it: it lies behind the last full block, or is the last token, which is always computed."""
    NOT_ELIGIBLE = "not_eligible"
    """The cache is off, or the request stays out of it."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix that every group can serve. Evictable until admitted."""

    num_blocks: int
    """Blocks of the prefix, in each group."""
    blocks: tuple[tuple[Block, ...], ...]
    """Per group, those that it needs: the last ones of the prefix, or all."""
    num_known_blocks: int
    """Blocks of the longest prefix that somebody else is known to have computed: the groups with full attention have
    it, or where there is none the others have its last block."""


class PrefixLookup:
    """Looks prefixes up in a pool. Holds and changes nothing."""

    def __init__(self, pool: BlockPool, *, windows: Sequence[int], block_size: int) -> None:
        """`windows`: of each group, in tokens; 0 is full attention."""
        self._pool = pool
        self._block_size = block_size
        self._num_groups = len(windows)
        self._needed_before = tuple(blocks_before(window, block_size) for window in windows)

    def find(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """The longest cached prefix of the blocks with these `hashes`."""
        if any(self._needed_before):
            return self._find_with_windows(hashes)
        columns: list[list[Block]] = [[] for _ in range(self._num_groups)]
        for block_hash in hashes:
            found = [self._pool.lookup(BlockKey(block_hash, group)) for group in range(self._num_groups)]
            present = [block for block in found if block is not None]
            if len(present) < self._num_groups:
                break
            for column, block in zip(columns, present, strict=True):
                column.append(block)
        num_found = len(columns[0])
        return PrefixHit(num_found, tuple(map(tuple, columns)), num_found)

    def nothing(self) -> PrefixHit:
        return PrefixHit(0, ((),) * self._num_groups, 0)

    def misses(
        self, hashes: Sequence[BlockHash], hit: PrefixHit, *, num_prompt_tokens: int, num_found_tokens: int
    ) -> Mapping[MissReason, int]:
        """Why a prompt's tokens beyond the first `num_found_tokens` were not found: tokens by reason.

        `hashes` are those of the prompt's full blocks.
        """
        num_missed = num_prompt_tokens - num_found_tokens
        first_missed = -(-num_found_tokens // self._block_size)
        num_by_window = max(0, min(hit.num_known_blocks, len(hashes)) - first_missed)
        missed = hashes[first_missed + num_by_window :]
        num_evicted = sum(
            any(self._pool.was_evicted(BlockKey(block_hash, group)) for group in range(self._num_groups))
            for block_hash in missed
        )
        return {
            MissReason.EVICTED: num_evicted * self._block_size,
            MissReason.NEVER_SEEN: (len(missed) - num_evicted) * self._block_size,
            MissReason.WINDOW: num_by_window * self._block_size,
            MissReason.OPEN_BLOCK: num_missed - (len(missed) + num_by_window) * self._block_size,
        }

    def _find_with_windows(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        columns: list[list[Block | None]] = [[] for _ in range(self._num_groups)]
        runs = [0] * self._num_groups
        """Per group, how many blocks without a gap end here."""
        has_full = 0 in self._needed_before
        num_found = num_known = 0
        for index, block_hash in enumerate(hashes, start=1):
            is_served = True
            for group, needed in enumerate(self._needed_before):
                block = self._pool.lookup(BlockKey(block_hash, group))
                columns[group].append(block)
                runs[group] = 0 if block is None else runs[group] + 1
                if not needed and block is None:
                    return self._hit(columns, num_found, num_known)
                is_served = is_served and runs[group] >= min(needed or index, index)
            if has_full or all(runs):
                num_known = index
            if is_served:
                num_found = index
        return self._hit(columns, num_found, num_known)

    def _hit(self, columns: Sequence[Sequence[Block | None]], num_found: int, num_known: int) -> PrefixHit:
        blocks = []
        for column, needed in zip(columns, self._needed_before, strict=True):
            first = max(0, num_found - needed) if needed else 0
            # What else is there before it serves a prompt that parts from this one a little earlier.
            while needed and first and num_found - first < needed + SPARE_BLOCKS and column[first - 1] is not None:
                first -= 1
            blocks.append(tuple(block for block in column[first:num_found] if block is not None))
        return PrefixHit(num_found, tuple(blocks), num_known)
