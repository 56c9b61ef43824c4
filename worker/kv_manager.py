"""Which blocks a sequence holds: prefix hits, allocation, sharing, release.

The manager composes the block pool; the scheduler composes the manager. A sequence's table grows by whole blocks:

    | shared, sealed | own, sealed | own, open |        one row per group of layers
      hit or forked    full          still written

Sealed blocks are findable by hash from the schedule that computes them on: within a step every layer writes its KV
before anybody attends to it. A failed step withdraws what it sealed. Shared blocks are never written.

Groups whose layers see only a window hold only what that needs, and give up the rest as they go:

    | not held | window | next tokens |

A prefix is found if every group can serve it: one with full attention needs all blocks of it, one with a window those
just before its end. Which of the blocks that a window leaves behind are worth keeping in the cache is decided here:
those before the end of a prompt; those before the end of what another prompt had in common with it (where only the
window was missing, the next one will find it); and those before regular places, far apart. A sequence's last ones it
holds until it ends. What lies between is reused first: it serves only a prompt that parts from this one just there.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as OrderedCollection
from dataclasses import dataclass
from enum import StrEnum

from pagoda.worker.block_pool import Block, BlockKey, BlockPool
from pagoda.worker.errors import IntegrityError
from pagoda.worker.kv_spec import SPARE_BLOCKS, blocks_before, blocks_in_window, first_block_needed
from pagoda.worker.sequence import Sequence
from pagoda.worker.types import SequenceId

_STRIDE_WINDOWS = 8
"""Windows from one regular place to the next, before which a window's blocks are kept like all others."""


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


@dataclass(slots=True)
class BlockTable:
    """The blocks one sequence holds, per group, and how many of each group's are sealed."""

    groups: tuple[list[Block | None], ...]
    """None is a block that a window has left behind."""
    num_sealed: int
    boundaries: tuple[int, ...] = ()
    """Blocks after which prompts may part: a window before them is of use to others."""
    num_left: list[int] | None = None
    """Per group, how many blocks at the table's beginning are None."""

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """For ranks: where a block is not held, one that is. It is hidden there, and weighs nothing."""
        return tuple(_block_ids(group) for group in self.groups)


def _block_ids(group: OrderedCollection[Block | None]) -> tuple[int, ...]:
    filler = next((block.block_id for block in group if block is not None), 0)
    return tuple(filler if block is None else block.block_id for block in group)


class KVManager:
    """Block tables of all running sequences. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        windows: OrderedCollection[int] = (0,),
        block_size: int,
        enable_prefix_caching: bool,
        max_step_tokens: int,
    ) -> None:
        """`windows`: of each group, in tokens; 0 is full attention. A step computes at most `max_step_tokens`."""
        self.pool = pool
        self.block_size = block_size
        self.windows = tuple(windows)
        self.enable_prefix_caching = enable_prefix_caching
        self._most_held = tuple(blocks_in_window(w, block_size, max_step_tokens) if w else 0 for w in self.windows)
        self._needed_before = tuple(blocks_before(window, block_size) for window in self.windows)
        self.has_windows = any(self.windows)
        self._tables: dict[SequenceId, BlockTable] = {}
        self._updates: list[tuple[SequenceId, int, int, int]] = []
        self._sealed_this_step: list[Block] = []
        self._duplicates: list[tuple[SequenceId, int, int, BlockKey]] = []

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def announced_windows(self) -> tuple[int, ...]:
        """Blocks before a boundary that are needed, for each number of `KVCacheSpec.announced_as`; 0: all of them."""
        return tuple(blocks_before(window, self.block_size) for window in dict.fromkeys(self.windows))

    def table(self, sequence: Sequence) -> BlockTable:
        return self._tables[sequence.sequence_id]

    # -- what is found ---------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """The sequence's longest cached prefix, in whole blocks."""
        if not self.enable_prefix_caching:
            return PrefixHit(0, ((),) * self.num_groups, 0)
        if not self.has_windows:
            return self._lookup_full(sequence)
        columns: list[list[Block | None]] = [[] for _ in self.windows]
        runs = [0] * self.num_groups
        num_found = num_full = 0
        for index, block_hash in enumerate(sequence.block_hashes, start=1):
            is_served = True
            for group, needed in enumerate(self._needed_before):
                block = self.pool.lookup(BlockKey(block_hash, group))
                columns[group].append(block)
                runs[group] = 0 if block is None else runs[group] + 1
                if not needed and block is None:
                    return self._hit(columns, num_found, num_full)
                is_served = is_served and runs[group] >= min(needed or index, index)
            if 0 in self.windows or all(runs):
                num_full = index
            if is_served:
                num_found = index
        return self._hit(columns, num_found, num_full)

    def _lookup_full(self, sequence: Sequence) -> PrefixHit:
        columns: list[list[Block]] = [[] for _ in self.windows]
        for block_hash in sequence.block_hashes:
            found = [self.pool.lookup(BlockKey(block_hash, group)) for group in range(self.num_groups)]
            present = [block for block in found if block is not None]
            if len(present) < self.num_groups:
                break
            for column, block in zip(columns, present, strict=True):
                column.append(block)
        num_found = len(columns[0])
        return PrefixHit(num_found, tuple(map(tuple, columns)), num_found)

    def _hit(self, columns: list[list[Block | None]], num_found: int, num_full: int) -> PrefixHit:
        blocks = []
        for column, needed in zip(columns, self._needed_before, strict=True):
            first = max(0, num_found - needed) if needed else 0
            # What else is there before it serves a prompt that parts from this one a little earlier.
            while needed and first and num_found - first < needed + SPARE_BLOCKS and column[first - 1] is not None:
                first -= 1
            blocks.append(tuple(block for block in column[first:num_found] if block is not None))
        return PrefixHit(num_found, tuple(blocks), num_full)

    def misses(self, sequence: Sequence, hit: PrefixHit, num_found_tokens: int) -> Mapping[MissReason, int]:
        """Why the sequence's prompt tokens beyond the first `num_found_tokens` were not found: tokens by reason."""
        num_missed = sequence.num_prompt_tokens - num_found_tokens
        if not self.enable_prefix_caching or sequence.hash_root is None:
            return {MissReason.NOT_ELIGIBLE: num_missed}
        num_full_blocks = sequence.num_prompt_tokens // self.block_size
        first_missed = -(-num_found_tokens // self.block_size)
        num_by_window = max(0, min(hit.num_known_blocks, num_full_blocks) - first_missed)
        missed = sequence.block_hashes[first_missed + num_by_window : num_full_blocks]
        num_evicted = sum(
            any(self.pool.was_evicted(BlockKey(block_hash, group)) for group in range(self.num_groups))
            for block_hash in missed
        )
        return {
            MissReason.EVICTED: num_evicted * self.block_size,
            MissReason.NEVER_SEEN: (len(missed) - num_evicted) * self.block_size,
            MissReason.WINDOW: num_by_window * self.block_size,
            MissReason.OPEN_BLOCK: num_missed - (len(missed) + num_by_window) * self.block_size,
        }

    # -- what is held ----------------------------------------------------------------------------

    def fits(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether the free blocks hold all that the sequence needs at once and the hit lacks."""
        num_revived = sum(block.ref_count == 0 for column in hit.blocks for block in column)
        return sum(self._num_new_blocks(sequence, hit)) + num_revived <= self.pool.num_free

    def admit(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Hold the hit and allocate the rest of what the sequence needs at once: all its tokens, or for a window the
        next ones. False, and nothing done, if it won't fit."""
        if not self.fits(sequence, hit):
            return False
        num_new = self._num_new_blocks(sequence, hit)
        for column in hit.blocks:
            for block in column:
                self.pool.acquire(block)
        groups: list[list[Block | None]] = []
        num_left = []
        for column, num in zip(hit.blocks, num_new, strict=True):
            num_left.append(hit.num_blocks - len(column))
            groups.append([None] * num_left[-1] + [*column] + [self.pool.allocate() for _ in range(num)])
        self._tables[sequence.sequence_id] = BlockTable(
            tuple(groups),
            num_sealed=hit.num_blocks,
            boundaries=self._boundaries(sequence, hit),
            num_left=num_left,
        )
        return True

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Whether the parent's windows still hold what comes before the end of the prompt."""
        table = self.table(parent)
        num_needed = child.num_prompt_tokens // self.block_size
        return all(
            not window or left <= first_block_needed(window, self.block_size, num_needed * self.block_size)
            for window, left in zip(self.windows, table.num_left or [0] * self.num_groups, strict=True)
        )

    def fits_fork(self, child: Sequence) -> bool:
        """Whether the free blocks hold the copies that `fork` makes."""
        return child.num_prompt_tokens % self.block_size == 0 or self.num_groups <= self.pool.num_free

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
        """Give `child` the parent's prompt: full blocks shared, the open one as a copy, since both will write to it.

        The parent must have computed the prompt in earlier steps, and `can_fork`. Returns the (source, destination)
        block ids to copy; None, and nothing done, if the copies do not fit.
        """
        if not self.fits_fork(child):
            return None
        num_shared, num_open_tokens = divmod(child.num_prompt_tokens, self.block_size)
        theirs = self.table(parent)
        copies = []
        groups = tuple(group[:num_shared] for group in theirs.groups)
        for own, their in zip(groups, theirs.groups, strict=True):
            for block in own:
                if block is not None:
                    self.pool.acquire(block)
            if num_open_tokens:
                source, copy = their[num_shared], self.pool.allocate()
                if source is None:
                    raise IntegrityError(f"{parent.sequence_id} no longer holds what {child.sequence_id} is to copy")
                copies.append((source.block_id, copy.block_id))
                own.append(copy)
        num_left = [sum(block is None for block in group) for group in groups]
        self._tables[child.sequence_id] = BlockTable(groups, num_shared, theirs.boundaries, num_left)
        return copies

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the sequence's first `num_tokens`; windows give up what they have left behind.

        False, and no room made, if the pool has none.
        """
        table = self._tables[sequence.sequence_id]
        if self.has_windows:
            self._leave_behind(table, sequence.num_computed_tokens)
        num_columns = -(-num_tokens // self.block_size)
        if not self.has_windows and num_columns <= len(table.groups[0]):
            return True
        num_new = sum(max(0, num_columns - len(group)) for group in table.groups)
        if num_new == 0:
            return True
        if num_new > self.pool.num_free:
            return False
        for index, group in enumerate(table.groups):
            for column in range(len(group), num_columns):
                block = self.pool.allocate()
                self._updates.append((sequence.sequence_id, index, column, block.block_id))
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
                key, block = BlockKey(block_hash, group), blocks[index]
                if block is None:
                    raise IntegrityError(f"{sequence.sequence_id} has given up block {index} before it was full")
                if self.pool.seal(block, key) is block:
                    self._sealed_this_step.append(block)
                else:
                    self._duplicates.append((sequence.sequence_id, group, index, key))
            table.num_sealed = index + 1

    def free(self, sequence: Sequence) -> None:
        """Give up all the sequence's blocks, tail first, so that a chain's tail is evicted before its head."""
        table = self._tables.pop(sequence.sequence_id)
        for index in reversed(range(max(map(len, table.groups)))):
            for group in table.groups:
                if index < len(group) and (block := group[index]) is not None:
                    self.pool.release(block)
        # The next sequence of this id, perhaps started before they go out, has a table of its own.
        self._updates = [update for update in self._updates if update[0] != sequence.sequence_id]

    def take_updates(self) -> list[tuple[SequenceId, int, int, int]]:
        """Table entries that changed since the last call: (sequence, group, index, block id)."""
        updates, self._updates = self._updates, []
        return updates

    def finish_step(self) -> None:
        """The step's KV is real: where it recomputed a block that was cached already, hold the cached one instead."""
        for sequence_id, group, index, key in self._duplicates:
            if (table := self._tables.get(sequence_id)) is None or (own := table.groups[group][index]) is None:
                continue
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
            for window, group in zip(self.windows, table.groups, strict=True):
                held = [block.block_id for block in group if block is not None]
                is_short = not window and len(held) < max(map(len, table.groups))
                if table.num_sealed > len(group) or is_short:
                    raise IntegrityError(f"the table of {sequence_id} is uneven")
                if None in group[len(group) - len(held) :]:
                    raise IntegrityError(f"the table of {sequence_id} has a hole")
                holds.update(held)
        self.pool.check_integrity(holds)

    def _num_new_blocks(self, sequence: Sequence, hit: PrefixHit) -> list[int]:
        """Per group, the blocks that the sequence gets when it is admitted."""
        missing = -(-len(sequence.token_ids) // self.block_size) - hit.num_blocks
        return [
            min(missing, most - len(column)) if most else missing
            for most, column in zip(self._most_held, hit.blocks, strict=True)
        ]

    def _boundaries(self, sequence: Sequence, hit: PrefixHit) -> tuple[int, ...]:
        ends = {sequence.num_prompt_tokens // self.block_size, hit.num_blocks, hit.num_known_blocks}
        return tuple(ends) if self.has_windows else ()

    def _leave_behind(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Give up what no window needs after `num_computed_tokens` tokens."""
        assert table.num_left is not None
        for number, window in enumerate(self.windows):
            if not window:
                continue
            group = table.groups[number]
            # What is not sealed yet is about to be.
            end = min(first_block_needed(window, self.block_size, num_computed_tokens), len(group))
            for index in range(table.num_left[number], end):
                if (block := group[index]) is not None:
                    self.pool.release(block, is_of_use=self._is_of_use(index, window, table.boundaries))
                    group[index] = None
            table.num_left[number] = max(table.num_left[number], end)

    def _is_of_use(self, index: int, window: int, boundaries: OrderedCollection[int]) -> bool:
        """Whether a block lies in the window before one of the boundaries, or of the regular ones."""
        stride = _STRIDE_WINDOWS * blocks_before(window, self.block_size)
        regular = index - index % stride + stride
        return any(
            first_block_needed(window, self.block_size, boundary * self.block_size) <= index < boundary
            for boundary in (regular, *boundaries)
        )
