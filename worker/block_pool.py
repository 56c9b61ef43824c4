"""The pool of KV blocks: who holds each, what it caches, which goes next.

A block is in one of three states:

    free, nothing cached  --allocate-->  held  --seal-->  held, cached
           ^                               |                 |
           +----------- release -----------+                 | release (last holder)
           |                                                 v
           +------------- evicted by allocate --------- free, cached  --acquire--> held, cached

`release` takes a sequence's blocks tail first, so that of a chain of cached blocks the tail is always evicted before
the blocks it depends on. Only ids and counts live here; the bytes are the runner's.

Free blocks are taken in this order: those that cache nothing; those whose last holder said that what they cache is of
little use, oldest first; the others, least recently used first.

The pool remembers as many evicted keys as it has blocks, the latest ones: what misses them would have been found in a
pool of about twice the size.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pagoda.worker.block_hash import BlockHash
from pagoda.worker.errors import IntegrityError
from pagoda.worker.kv_events import KVEventLog


class BlockKey(NamedTuple):
    """What a sealed block is found by: the chain up to it and the group of layers it belongs to."""

    block_hash: BlockHash
    group: int


class Block:
    """One block. `prev` and `next` link it into the free queue while nobody holds it."""

    __slots__ = ("block_id", "is_spare", "key", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.is_spare = False
        """Whether it is free, cached and of little use."""
        self.key: BlockKey | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, cached={self.key is not None})"


class FreeQueue:
    """Free blocks in the order they will be taken. A linked list through the blocks: any of them leaves in O(1)."""

    def __init__(self) -> None:
        self._ends = Block(-1)
        self._ends.prev = self._ends.next = self._ends
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Add as the last to be taken."""
        assert self._ends.prev is not None
        self._link(self._ends.prev, block)

    def append_left(self, block: Block) -> None:
        """Add as the next to be taken."""
        self._link(self._ends, block)

    @property
    def first(self) -> Block | None:
        """The next to be taken."""
        return None if self._ends.next is self._ends else self._ends.next

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        if before is None or after is None:
            raise IntegrityError(f"{block} is not in the free queue")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._length -= 1

    def _link(self, before: Block, block: Block) -> None:
        if block.next is not None:
            raise IntegrityError(f"{block} is in the free queue already")
        after = before.next
        assert after is not None
        block.prev, block.next = before, after
        before.next = after.prev = block
        self._length += 1


class BlockPool:
    """All blocks of a replica. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int, log: KVEventLog | None = None) -> None:
        """`log` is told what becomes findable and what no longer is."""
        self._log = log
        self.num_released = 0
        """Blocks that their last holder has given up, since the start."""
        self.num_evicted = 0
        """Blocks that lost what they cached to somebody who needed one, since the start."""
        self._num_free_cached = 0
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeQueue()
        """Those that cache nothing, then cached ones."""
        self._spare = FreeQueue()
        self._index: dict[BlockKey, Block] = {}
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()
        """In the order of their eviction."""
        for block in self._blocks:
            self._free.append(block)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._spare)

    @property
    def num_empty(self) -> int:
        """Free blocks that cache nothing."""
        return self.num_free - self._num_free_cached

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key."""
        return len(self._index)

    def lookup(self, key: BlockKey) -> Block | None:
        """The block cached under `key`. It stays evictable until it is acquired."""
        return self._index.get(key)

    def was_evicted(self, key: BlockKey) -> bool:
        """Whether a block was cached under `key` until one of the latest `num_blocks` evictions."""
        return key in self._evicted

    def allocate(self) -> Block:
        """Take the next free block, dropping what it cached. Raises `IntegrityError` if none is free."""
        first = self._free.first
        block = first if first is not None and first.key is None else self._spare.first or first
        if block is None:
            raise IntegrityError("the free queue is empty")
        self._unqueue(block)
        block.ref_count = 1
        if block.key is not None:
            self.num_evicted += 1
            self._remember(block.key)
            self.withdraw(block)
        return block

    def acquire(self, block: Block) -> None:
        """Hold `block` once more."""
        if block.ref_count == 0:
            self._unqueue(block)
        block.ref_count += 1

    def release(self, block: Block, *, is_of_use: bool = True) -> None:
        """Give up one hold. The last one frees the block: kept for later if cached, and longer if that is of use."""
        if block.ref_count < 1:
            raise IntegrityError(f"{block} released while nobody holds it")
        block.ref_count -= 1
        if block.ref_count == 0:
            self.num_released += 1
            self._num_free_cached += block.key is not None
            if block.key is None:
                self._free.append_left(block)
            elif is_of_use:
                self._free.append(block)
            else:
                block.is_spare = True
                self._spare.append(block)

    def seal(self, block: Block, key: BlockKey) -> Block:
        """Make a full block findable. Returns the block found under `key` from now on: an older one stays."""
        canonical = self._index.setdefault(key, block)
        if canonical is block:
            block.key = key
            self._evicted.pop(key, None)
            if self._log is not None:
                self._log.stored(key.group, key.block_hash)
        return canonical

    def withdraw(self, block: Block) -> None:
        """Make `block` unfindable; who holds it keeps it."""
        if (key := block.key) is not None:
            del self._index[key]
            block.key = None
            self._num_free_cached -= block.ref_count == 0
            if self._log is not None:
                self._log.removed(key.group, key.block_hash)

    def _unqueue(self, block: Block) -> None:
        """A free block gets a holder."""
        (self._spare if block.is_spare else self._free).remove(block)
        self._num_free_cached -= block.key is not None
        block.is_spare = False

    def _remember(self, key: BlockKey) -> None:
        self._evicted[key] = None
        if len(self._evicted) > len(self._blocks):
            self._evicted.popitem(last=False)

    def clear_cache(self) -> None:
        """Make every block unfindable."""
        for block in list(self._index.values()):
            self.withdraw(block)
        self._evicted.clear()
        if self._log is not None:
            self._log.cleared()

    def check_integrity(self, holds: Mapping[int, int]) -> None:
        """Raise `IntegrityError` unless counts, queue and index agree with `holds` (block id -> holders)."""
        free_ids = [block.block_id for queue in (self._free, self._spare) for block in queue]
        if len(free_ids) != self.num_free or len(set(free_ids)) != len(free_ids):
            raise IntegrityError("the free queue's length or links are wrong")
        free = set(free_ids)
        for block in self._blocks:
            if block.ref_count != holds.get(block.block_id, 0):
                raise IntegrityError(f"{block} has {holds.get(block.block_id, 0)} holders")
            if (block.ref_count == 0) != (block.block_id in free):
                raise IntegrityError(f"{block} is {'in' if block.block_id in free else 'not in'} the free queue")
            if block.key is not None and self._index.get(block.key) is not block:
                raise IntegrityError(f"{block} has a key that does not find it")
        if any(not block.is_spare for block in self._spare) or any(block.is_spare for block in self._free):
            raise IntegrityError("a block is in the wrong queue")
        if sum(self._blocks[block_id].key is not None for block_id in free_ids) != self._num_free_cached:
            raise IntegrityError("the count of free blocks that cache something is wrong")
        if any(block.key != key for key, block in self._index.items()):
            raise IntegrityError("the index finds a block under a key that is not its own")
