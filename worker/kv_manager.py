"""Which blocks a sequence holds: prefix hits, allocation, sharing, release.

The manager composes the block pool; the scheduler composes the manager. A sequence's table grows by whole blocks:

    | shared, sealed | own, sealed | own, open |        one row per group of layers
      hit or forked    full          still written

Sealed blocks are findable by hash from the schedule that computes them on: within a step every layer writes its KV
before anybody attends to it. A failed step withdraws what it sealed. Shared blocks are never written.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagoda.worker.block_pool import Block, BlockKey, BlockPool
from pagoda.worker.errors import IntegrityError
from pagoda.worker.sequence import Sequence
from pagoda.worker.types import SequenceId


class MissReason(StrEnum):
    """Why a prompt token was not found in the cache."""

    EVICTED = "evicted"
    """Its block was cached until one of the latest evictions, of which the pool remembers as many as it has blocks."""
    NEVER_SEEN = "never_seen"
    """Its block is neither cached nor among those."""
    OPEN_BLOCK = "open_block"
    """No lookup could find it: it lies behind the last full block, or is the last token, which is always computed."""
    NOT_ELIGIBLE = "not_eligible"
    """The cache is off, or the request stays out of it."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix that every group can serve. Evictable until admitted."""

    blocks: tuple[tuple[Block, ...], ...]
    """Per group, from the first block on."""

    @property
    def num_blocks(self) -> int:
        """Blocks per group."""
        return len(self.blocks[0])


@dataclass(slots=True)
class BlockTable:
    """The blocks one sequence holds, per group, and how many of each group's are sealed."""

    groups: tuple[list[Block], ...]
    num_sealed: int

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(block.block_id for block in group) for group in self.groups)


class KVManager:
    """Block tables of all running sequences. Not thread-safe: the engine thread owns it."""

    def __init__(self, pool: BlockPool, *, num_groups: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[SequenceId, BlockTable] = {}
        self._updates: list[tuple[SequenceId, int, int, int]] = []
        self._sealed_this_step: list[Block] = []
        self._duplicates: list[tuple[SequenceId, int, int, BlockKey]] = []

    def table(self, sequence: Sequence) -> BlockTable:
        return self._tables[sequence.sequence_id]

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """The sequence's longest cached prefix, in whole blocks."""
        columns: list[list[Block]] = [[] for _ in range(self.num_groups)]
        if self.enable_prefix_caching:
            for block_hash in sequence.block_hashes:
                found = [self.pool.lookup(BlockKey(block_hash, group)) for group in range(self.num_groups)]
                present = [block for block in found if block is not None]
                if len(present) < self.num_groups:
                    break
                for column, block in zip(columns, present, strict=True):
                    column.append(block)
        return PrefixHit(tuple(tuple(column) for column in columns))

    def misses(self, sequence: Sequence, num_found_tokens: int) -> Mapping[MissReason, int]:
        """Why the sequence's prompt tokens beyond the first `num_found_tokens` were not found: tokens by reason."""
        num_missed = sequence.num_prompt_tokens - num_found_tokens
        if not self.enable_prefix_caching or sequence.hash_root is None:
            return {MissReason.NOT_ELIGIBLE: num_missed}
        num_full_blocks = sequence.num_prompt_tokens // self.block_size
        missed = sequence.block_hashes[-(-num_found_tokens // self.block_size) : num_full_blocks]
        num_evicted = sum(
            any(self.pool.was_evicted(BlockKey(block_hash, group)) for group in range(self.num_groups))
            for block_hash in missed
        )
        return {
            MissReason.EVICTED: num_evicted * self.block_size,
            MissReason.NEVER_SEEN: (len(missed) - num_evicted) * self.block_size,
            MissReason.OPEN_BLOCK: num_missed - len(missed) * self.block_size,
        }

    def fits(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether the free blocks hold all the sequence's tokens that the hit lacks."""
        num_new = self._num_blocks_for(sequence) - hit.num_blocks
        num_revived = sum(block.ref_count == 0 for column in hit.blocks for block in column)
        return num_new * self.num_groups + num_revived <= self.pool.num_free

    def admit(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Hold the hit and allocate the rest of all the sequence's tokens. False, and nothing done, if it won't fit."""
        if not self.fits(sequence, hit):
            return False
        for column in hit.blocks:
            for block in column:
                self.pool.acquire(block)
        groups = tuple(list(column) for column in hit.blocks)
        for group in groups:
            group.extend(self.pool.allocate() for _ in range(self._num_blocks_for(sequence) - hit.num_blocks))
        self._tables[sequence.sequence_id] = BlockTable(groups, num_sealed=hit.num_blocks)
        return True

    def fits_fork(self, child: Sequence) -> bool:
        """Whether the free blocks hold the copies that `fork` makes."""
        return child.num_prompt_tokens % self.block_size == 0 or self.num_groups <= self.pool.num_free

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
        """Give `child` the parent's prompt: full blocks shared, the open one as a copy, since both will write to it.

        The parent must have computed the prompt in earlier steps. Returns the (source, destination) block ids to
        copy; None, and nothing done, if the copies do not fit.
        """
        if not self.fits_fork(child):
            return None
        num_shared, num_open_tokens = divmod(child.num_prompt_tokens, self.block_size)
        copies = []
        groups = tuple(group[:num_shared] for group in self.table(parent).groups)
        for own, theirs in zip(groups, self.table(parent).groups, strict=True):
            for block in own:
                self.pool.acquire(block)
            if num_open_tokens:
                copy = self.pool.allocate()
                copies.append((theirs[num_shared].block_id, copy.block_id))
                own.append(copy)
        self._tables[child.sequence_id] = BlockTable(groups, num_sealed=num_shared)
        return copies

    def extend(self, sequence: Sequence) -> bool:
        """Make room for all the sequence's tokens. False, and nothing done, if the pool has none."""
        table = self._tables[sequence.sequence_id]
        num_new = self._num_blocks_for(sequence) - len(table.groups[0])
        if num_new <= 0:
            return True
        if num_new * self.num_groups > self.pool.num_free:
            return False
        for index, group in enumerate(table.groups):
            for _ in range(num_new):
                block = self.pool.allocate()
                self._updates.append((sequence.sequence_id, index, len(group), block.block_id))
                group.append(block)
        return True

    def seal(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Publish the blocks that are full once the step leaves `num_computed_tokens` tokens computed."""
        if not self.enable_prefix_caching or sequence.hash_root is None:
            return
        table = self._tables[sequence.sequence_id]
        for index in range(table.num_sealed, num_computed_tokens // self.block_size):
            block_hash = sequence.block_hashes[index]
            for group, blocks in enumerate(table.groups):
                key = BlockKey(block_hash, group)
                if self.pool.seal(blocks[index], key) is blocks[index]:
                    self._sealed_this_step.append(blocks[index])
                else:
                    self._duplicates.append((sequence.sequence_id, group, index, key))
            table.num_sealed = index + 1

    def free(self, sequence: Sequence) -> None:
        """Give up all the sequence's blocks, tail first, so that a chain's tail is evicted before its head."""
        table = self._tables.pop(sequence.sequence_id)
        for index in reversed(range(len(table.groups[0]))):
            for group in table.groups:
                self.pool.release(group[index])
        # The next sequence of this id, perhaps started before they go out, has a table of its own.
        self._updates = [update for update in self._updates if update[0] != sequence.sequence_id]

    def take_updates(self) -> list[tuple[SequenceId, int, int, int]]:
        """Table entries that changed since the last call: (sequence, group, index, block id)."""
        updates, self._updates = self._updates, []
        return updates

    def finish_step(self) -> None:
        """The step's KV is real: where it recomputed a block that was cached already, hold the cached one instead."""
        for sequence_id, group, index, key in self._duplicates:
            if (table := self._tables.get(sequence_id)) is None:
                continue
            own = table.groups[group][index]
            canonical = self.pool.seal(own, key)
            if canonical is not own:
                self.pool.acquire(canonical)
                self.pool.release(own)
                table.groups[group][index] = canonical
                self._updates.append((sequence_id, group, index, canonical.block_id))
        self._duplicates.clear()
        self._sealed_this_step.clear()

    def fail_step(self) -> None:
        """The step's KV is not real: withdraw what it published. Its sequences are freed by the caller."""
        for block in self._sealed_this_step:
            self.pool.withdraw(block)
        self._sealed_this_step.clear()
        self._duplicates.clear()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the pool's counts are exactly what the tables hold."""
        holds: Counter[int] = Counter()
        for sequence_id, table in self._tables.items():
            if len({len(group) for group in table.groups}) != 1 or table.num_sealed > len(table.groups[0]):
                raise IntegrityError(f"the table of {sequence_id} is uneven")
            for group in table.groups:
                holds.update(block.block_id for block in group)
        self.pool.check_integrity(holds)

    def _num_blocks_for(self, sequence: Sequence) -> int:
        """Blocks, in each group, that hold all the sequence's tokens."""
        return -(-len(sequence.token_ids) // self.block_size)
