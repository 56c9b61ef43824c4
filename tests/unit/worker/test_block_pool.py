"""The pool's states, its eviction order, and what its integrity check finds."""

from collections.abc import Callable

import pytest

from pagoda.worker.block_hash import BlockHash
from pagoda.worker.block_pool import BlockKey, BlockPool, FreeQueue
from pagoda.worker.errors import IntegrityError


def key(number: int) -> BlockKey:
    return BlockKey(BlockHash(number.to_bytes(16)), 0)


def cached_and_free(pool: BlockPool, count: int) -> list[int]:
    """Seal `count` blocks under keys 0, 1, ... and release them in this order. Returns their ids."""
    blocks = [pool.allocate() for _ in range(count)]
    for number, block in enumerate(blocks):
        pool.seal(block, key(number))
        pool.release(block)
    return [block.block_id for block in blocks]


def test_fresh_blocks_are_taken_in_order() -> None:
    pool = BlockPool(3)
    assert [pool.allocate().block_id for _ in range(3)] == [0, 1, 2]
    assert (pool.num_blocks, pool.num_free) == (3, 0)


def test_empty_pool_gives_nothing() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(IntegrityError, match="empty"):
        pool.allocate()


def test_block_without_content_is_reused_before_any_cached_one() -> None:
    pool = BlockPool(4)
    cached_and_free(pool, 3)
    block = pool.allocate()
    pool.release(block)
    assert pool.allocate() is block
    assert pool.num_cached == 3


def test_cached_blocks_are_evicted_oldest_release_first() -> None:
    pool = BlockPool(3)
    ids = cached_and_free(pool, 3)
    assert [pool.allocate().block_id for _ in range(3)] == ids
    assert pool.num_cached == 0


def test_held_block_leaves_the_queue_and_comes_back_as_the_newest() -> None:
    pool = BlockPool(3)
    ids = cached_and_free(pool, 3)
    block = pool.lookup(key(0))
    pool.acquire(block)
    assert pool.num_free == 2
    pool.release(block)
    assert [pool.allocate().block_id for _ in range(3)] == [ids[1], ids[2], ids[0]]


def test_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.acquire(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_evicted_block_is_found_no_more() -> None:
    pool = BlockPool(1)
    cached_and_free(pool, 1)
    assert pool.allocate().key is None
    assert pool.lookup(key(0)) is None


def test_first_block_sealed_under_a_key_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert pool.seal(first, key(7)) is first
    assert pool.seal(second, key(7)) is first
    assert pool.lookup(key(7)) is first
    assert second.key is None


def test_groups_do_not_share_keys() -> None:
    pool = BlockPool(1)
    pool.seal(pool.allocate(), key(1))
    assert pool.lookup(BlockKey(key(1).block_hash, 1)) is None


def test_withdrawn_block_stays_with_its_holder() -> None:
    """It is found no more, may be withdrawn again, and another block may take the key."""
    pool = BlockPool(2)
    block, other = pool.allocate(), pool.allocate()
    pool.seal(block, key(1))
    pool.withdraw(block)
    pool.withdraw(block)
    assert pool.lookup(key(1)) is None
    assert pool.seal(other, key(1)) is other
    pool.check_integrity({block.block_id: 1, other.block_id: 1})


def test_cleared_cache_holds_nothing() -> None:
    pool = BlockPool(4)
    cached_and_free(pool, 2)
    held = pool.allocate()
    pool.seal(held, key(9))
    pool.clear_cache()
    assert (pool.num_cached, pool.num_free) == (0, 3)
    pool.check_integrity({held.block_id: 1})


def test_releasing_a_free_block_is_an_error() -> None:
    """A double free would put one block into two tables."""
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(IntegrityError, match="nobody holds"):
        pool.release(block)
    pool.check_integrity({})


def test_queue_refuses_a_block_twice_and_one_it_has_not() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    queue = FreeQueue()
    with pytest.raises(IntegrityError, match="not in"):
        queue.remove(block)
    queue.append(block)
    with pytest.raises(IntegrityError, match="already"):
        queue.append_left(block)
    assert list(queue) == [block]


def leak(pool: BlockPool) -> None:
    pool.allocate()


def hold_while_free(pool: BlockPool) -> None:
    pool.lookup(key(0)).ref_count = 1


def lose_from_queue(pool: BlockPool) -> None:
    pool._free.remove(pool.lookup(key(0)))


def miscount_queue(pool: BlockPool) -> None:
    pool._free._length += 1


def lose_from_index(pool: BlockPool) -> None:
    del pool._index[key(0)]


def index_under_wrong_key(pool: BlockPool) -> None:
    pool._index[key(5)] = pool.lookup(key(0))


@pytest.mark.parametrize(
    "damage", [leak, hold_while_free, lose_from_queue, miscount_queue, lose_from_index, index_under_wrong_key]
)
def test_check_finds(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    cached_and_free(pool, 2)
    pool.check_integrity({})
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity({})


def test_check_finds_a_holder_too_many() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.check_integrity({block.block_id: 1})
    with pytest.raises(IntegrityError, match="2 holders"):
        pool.check_integrity({block.block_id: 2})
