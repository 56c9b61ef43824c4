"""Which blocks a sequence holds: prefix hits, allocation, sharing, release.

The manager composes the block pool; the scheduler composes the manager. A sequence's table grows by whole blocks:

    | shared, sealed | own, sealed | own, open |        one row per group of layers
      hit or forked    full          still written

Sealed blocks are findable by hash from the schedule that computes them on: within a step every layer writes its KV
before anybody attends to it. A failed step withdraws what it sealed. Shared blocks are never written.

Groups whose layers see only a window hold only what that needs, and give up the rest as they go:

    | not held | window | next tokens |

Which of the blocks that a window leaves behind are worth keeping in the cache is decided here, by where other prompts
may end or part (`prefix_lookup.py` finds them): those before the end of a prompt; those before the end of what another
one had in common with it (where only the window was missing, the next one will find it); and those before regular
places, far apart. A sequence's last ones it holds until it ends. What lies between is reused before
them: it serves only a prompt that parts from this one just there.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as OrderedCollection
from dataclasses import dataclass

from pagoda.worker.block_pool import Block, BlockKey, BlockPool
from pagoda.worker.errors import IntegrityError
from pagoda.worker.kv_spec import blocks_before, blocks_in_window, first_block_needed
from pagoda.worker.prefix_lookup import MissReason, PrefixHit, PrefixLookup
from pagoda.worker.sequence import Sequence
from pagoda.worker.types import SequenceId

_STRIDE_WINDOWS = 8
"""Windows from one regular place to the next, before which a window's blocks are kept like all others."""


@dataclass(slots=True)
class BlockTable:
    """The blocks one sequence holds, per group, and how many of each group's are sealed."""

    groups: tuple[list[Block | None], ...]
    """None is a block that a window has left behind."""
    num_left: list[int]
    """Per group, how many blocks at the table's beginning are None."""
    num_sealed: int
    boundaries: tuple[int, ...]
    """Blocks after which prompts may part: a window before them is of use to others."""

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
        self._prefixes = PrefixLookup(pool, windows=self.windows, block_size=block_size)
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

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """The sequence's longest cached prefix, in whole blocks."""
        return self._prefixes.find(sequence.block_hashes) if self.enable_prefix_caching else self._prefixes.nothing()

    def misses(self, sequence: Sequence, hit: PrefixHit, num_found_tokens: int) -> Mapping[MissReason, int]:
        """Why the sequence's prompt tokens beyond the first `num_found_tokens` were not found: tokens by reason."""
        if not self.enable_prefix_caching or sequence.hash_chain is None:
            return {MissReason.NOT_ELIGIBLE: sequence.num_prompt_tokens - num_found_tokens}
        return self._prefixes.misses(
            sequence.block_hashes[: sequence.num_prompt_tokens // self.block_size],
            hit,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_found_tokens=num_found_tokens,
        )

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
            tuple(groups), num_left, num_sealed=hit.num_blocks, boundaries=self._boundaries(sequence, hit)
        )
        return True

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Whether the parent's windows still hold what comes before the end of the prompt."""
        table = self.table(parent)
        num_needed = child.num_prompt_tokens // self.block_size
        return all(
            not window or left <= first_block_needed(window, self.block_size, num_needed * self.block_size)
            for window, left in zip(self.windows, table.num_left, strict=True)
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
        self._tables[child.sequence_id] = BlockTable(groups, num_left, num_shared, theirs.boundaries)
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
        if not self.enable_prefix_caching or sequence.hash_chain is None:
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
