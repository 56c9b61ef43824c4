"""Random use of the block pool against a model made of a list and two dicts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda.worker.block_hash import BlockHash
from pagoda.worker.block_pool import BlockKey, BlockPool

KEYS = [BlockKey(BlockHash(bytes([number]) * 16), group) for number in range(3) for group in range(2)]


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: free ids in the order they go, those of little use among them, holders of each block, the id cached
    under each key, evicted keys."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, *, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.blocks = {}
        self.free = list(range(num_blocks))
        self.spare: list[int] = []
        self.holds = dict.fromkeys(range(num_blocks), 0)
        self.cached: dict[BlockKey, int] = {}
        self.evicted: list[BlockKey] = []

    @property
    def held(self) -> list[int]:
        return [block_id for block_id, count in self.holds.items() if count]

    @precondition(lambda self: self.free or self.spare)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        is_first_empty = self.free and self.free[0] not in self.cached.values()
        queue = self.free if is_first_empty or not self.spare else self.spare
        assert block.block_id == queue.pop(0)
        self.blocks[block.block_id] = block
        self.holds[block.block_id] = 1
        self.evicted += [key for key, cached_id in self.cached.items() if cached_id == block.block_id]
        self.evicted = self.evicted[-self.pool.num_blocks :]
        self._uncache(block.block_id)

    @rule(key=st.sampled_from(KEYS))
    def hit(self, *, key: BlockKey) -> None:
        block = self.pool.lookup(key)
        assert (block and block.block_id) == self.cached.get(key)
        if block is not None:
            self.pool.acquire(block)
            self.holds[block.block_id] += 1
            for queue in (self.free, self.spare):
                if block.block_id in queue:
                    queue.remove(block.block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_of_use=st.booleans())
    def release(self, *, data: st.DataObject, is_of_use: bool) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        self.pool.release(self.blocks[block_id], is_of_use=is_of_use)
        self.holds[block_id] -= 1
        if self.holds[block_id] == 0:
            is_cached = block_id in self.cached.values()
            queue = self.spare if is_cached and not is_of_use else self.free
            queue.insert(len(queue) if is_cached else 0, block_id)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def seal(self, *, data: st.DataObject, key: BlockKey) -> None:
        """Publish a block that somebody holds and that is not published yet."""
        open_ids = [block_id for block_id in self.held if block_id not in self.cached.values()]
        if open_ids:
            block_id = data.draw(st.sampled_from(open_ids))
            canonical = self.pool.seal(self.blocks[block_id], key)
            assert canonical.block_id == self.cached.setdefault(key, block_id)
            self.evicted = [other for other in self.evicted if other != key]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def withdraw(self, *, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.blocks)))
        self.pool.withdraw(self.blocks[block_id])
        self._uncache(block_id)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.cached.clear()
        self.evicted.clear()

    @invariant()
    def agree(self) -> None:
        self.pool.check_integrity(self.holds)
        assert self.pool.num_free == len(self.free) + len(self.spare)
        assert self.pool.num_empty == len({*self.free, *self.spare} - {*self.cached.values()})
        assert self.pool.num_cached == len(self.cached)
        assert [key for key in KEYS if self.pool.was_evicted(key)] == sorted(self.evicted)

    def _uncache(self, block_id: int) -> None:
        self.cached = {key: cached_id for key, cached_id in self.cached.items() if cached_id != block_id}


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(stateful_step_count=40)
