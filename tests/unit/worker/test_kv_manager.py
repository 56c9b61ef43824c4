"""Block tables: hits, allocation, publishing, forks, release."""

import pytest
from fakes import hash_root

from pagoda.worker.block_hash import BlockHash, HashChain
from pagoda.worker.block_pool import BlockKey, BlockPool
from pagoda.worker.errors import IntegrityError
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.sequence import Sequence
from pagoda.worker.types import Request, RequestId, SamplingParams

BLOCK_SIZE = 4
ROOT = hash_root(b"")


def make_manager(num_blocks: int = 16, *, num_groups: int = 1, enable_prefix_caching: bool = True) -> KVManager:
    return KVManager(
        BlockPool(num_blocks),
        windows=(0,) * num_groups,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=enable_prefix_caching,
        max_step_tokens=64,
    )


def make_sequence(name: str, num_tokens: int, *, first: int = 0, root: BlockHash | None = ROOT) -> Sequence:
    """A sequence of tokens first, first + 1, ..."""
    prompt = tuple(range(first, first + num_tokens))
    return Sequence(
        Request(RequestId(name), prompt, SamplingParams()),
        0,
        arrival=0,
        seed=0,
        max_tokens=100,
        eos_token_ids=frozenset(),
        hash_chain=HashChain(root) if root is not None else None,
        block_size=BLOCK_SIZE,
    )


def admit(manager: KVManager, sequence: Sequence) -> int:
    """Admit with what is cached. Returns the number of blocks hit."""
    hit = manager.lookup(sequence)
    assert manager.admit(sequence, hit)
    return hit.num_blocks


def compute(manager: KVManager, sequence: Sequence) -> None:
    """One successful step that computes all the sequence's tokens."""
    manager.seal(sequence, sequence.num_tokens)
    manager.finish_step()


def run_and_free(manager: KVManager, sequence: Sequence) -> None:
    admit(manager, sequence)
    compute(manager, sequence)
    manager.free(sequence)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_admission_takes_blocks_for_all_tokens(num_tokens: int, num_blocks: int, num_groups: int) -> None:
    manager = make_manager(num_groups=num_groups)
    sequence = make_sequence("a", num_tokens)
    admit(manager, sequence)
    assert [len(table) for table in manager.table(sequence).block_ids] == [num_blocks] * num_groups
    assert manager.pool.num_free == 16 - num_blocks * num_groups
    manager.check_integrity()


def test_admission_that_does_not_fit_changes_nothing() -> None:
    """Two of the three blocks needed are cached but free: taking them leaves no room for the third."""
    manager = make_manager(2)
    run_and_free(manager, make_sequence("a", 8))
    longer = make_sequence("b", 9)
    hit = manager.lookup(longer)
    assert hit.num_blocks == 2
    assert not manager.fits(longer, hit)
    assert not manager.admit(longer, hit)
    assert (manager.pool.num_free, manager.pool.num_cached) == (2, 2)
    manager.check_integrity()


def test_hit_on_held_blocks_takes_no_room() -> None:
    manager = make_manager(3)
    first = make_sequence("a", 8)
    admit(manager, first)
    compute(manager, first)
    assert admit(manager, make_sequence("b", 9)) == 2
    assert manager.pool.num_free == 0
    manager.check_integrity()


def test_lookup_holds_nothing() -> None:
    manager = make_manager(2)
    run_and_free(manager, make_sequence("a", 8))
    assert manager.lookup(make_sequence("b", 8)).num_blocks == 2
    assert manager.pool.num_free == 2


def test_hit_is_what_every_group_can_serve() -> None:
    """A block that one group has lost ends the hit for both."""
    manager = make_manager(num_groups=2)
    sequence = make_sequence("a", 12)
    run_and_free(manager, sequence)
    manager.pool.withdraw(manager.pool.lookup(BlockKey(sequence.block_hashes[1], 1)))
    hit = manager.lookup(make_sequence("b", 12))
    assert [len(blocks) for blocks in hit.blocks] == [1, 1]


def test_blocks_are_found_from_the_step_that_computes_them() -> None:
    """Full blocks only, chunk by chunk."""
    manager = make_manager()
    sequence = make_sequence("a", 10)
    admit(manager, sequence)
    other = make_sequence("b", 10)
    found = []
    for num_computed_tokens in (3, 5, 8, 10):
        manager.seal(sequence, num_computed_tokens)
        found.append(manager.lookup(other).num_blocks)
    assert found == [0, 1, 2, 2]


def test_failed_step_withdraws_only_its_own_blocks() -> None:
    manager = make_manager()
    sequence = make_sequence("a", 8)
    admit(manager, sequence)
    manager.seal(sequence, 4)
    manager.finish_step()
    manager.seal(sequence, 8)
    manager.fail_step()
    manager.free(sequence)
    assert manager.lookup(make_sequence("b", 8)).num_blocks == 1
    manager.check_integrity()


@pytest.mark.parametrize(("root", "enable_prefix_caching"), [(None, True), (ROOT, False)])
def test_nothing_is_published_or_found_without_caching(root: BlockHash | None, enable_prefix_caching: bool) -> None:
    """Of a sequence that has no hashes, or in a manager that caches nothing."""
    manager = make_manager(enable_prefix_caching=enable_prefix_caching)
    run_and_free(manager, make_sequence("a", 8, root=root))
    assert manager.pool.num_cached == 0
    assert manager.lookup(make_sequence("b", 8, root=root)).num_blocks == 0


def test_extending_tells_the_new_entries() -> None:
    """A block per group, once the tokens need it."""
    manager = make_manager(num_groups=2)
    sequence = make_sequence("a", 3)
    admit(manager, sequence)
    sequence.append(3)
    assert manager.extend(sequence, sequence.num_tokens)
    assert manager.take_updates() == []
    sequence.append(4)
    assert manager.extend(sequence, sequence.num_tokens)
    tables = manager.table(sequence).block_ids
    assert manager.take_updates() == [("a/0", 0, 1, tables[0][1]), ("a/0", 1, 1, tables[1][1])]
    assert manager.take_updates() == []
    manager.check_integrity()


def test_extending_without_room_changes_nothing() -> None:
    """One block is free, two groups need one each."""
    manager = make_manager(3, num_groups=2)
    sequence = make_sequence("a", 4)
    admit(manager, sequence)
    sequence.append(4)
    assert not manager.extend(sequence, sequence.num_tokens)
    assert (manager.pool.num_free, manager.take_updates()) == (1, [])


def two_that_compute_the_same(manager: KVManager) -> tuple[Sequence, Sequence]:
    """Both were admitted before either had computed anything; the first one has computed by now."""
    first, second = make_sequence("a", 8), make_sequence("b", 8)
    admit(manager, first)
    admit(manager, second)
    compute(manager, first)
    return first, second


def test_duplicate_is_replaced_after_the_step() -> None:
    """Until then the second one needs its own blocks: it is writing them."""
    manager = make_manager()
    first, second = two_that_compute_the_same(manager)
    own = manager.table(second).block_ids
    manager.seal(second, 8)
    assert manager.table(second).block_ids == own
    manager.finish_step()
    assert manager.table(second).block_ids == manager.table(first).block_ids
    (shared,) = manager.table(first).block_ids
    assert manager.take_updates() == [("b/0", 0, 0, shared[0]), ("b/0", 0, 1, shared[1])]
    assert manager.pool.num_free == 14
    manager.check_integrity()


def test_duplicate_takes_over_when_the_cached_block_goes_meanwhile() -> None:
    """Between publishing and the end of the step another sequence's blocks evicted the cached ones."""
    manager = make_manager(4)
    first, second = two_that_compute_the_same(manager)
    manager.free(first)
    own = manager.table(second).block_ids
    manager.seal(second, 8)
    admit(manager, make_sequence("c", 8, first=50))
    manager.finish_step()
    assert manager.table(second).block_ids == own
    assert [block.block_id for block in manager.lookup(first).blocks[0]] == list(own[0])
    manager.check_integrity()


def test_failed_step_forgets_its_duplicates() -> None:
    """The next sequence of the same id has other blocks, which must not be published under the old ones' hashes."""
    manager = make_manager()
    first, second = two_that_compute_the_same(manager)
    manager.seal(second, 8)
    manager.fail_step()
    manager.free(second)
    again = make_sequence("b", 8, first=50)
    admit(manager, again)
    own = manager.table(again).block_ids
    manager.finish_step()
    assert manager.table(again).block_ids == own
    assert manager.lookup(first).num_blocks == 2
    manager.check_integrity()


def test_freed_sequence_gets_no_more_entries() -> None:
    """Neither those it still had to get, nor those of a duplicate found in its last step."""
    manager = make_manager()
    _, second = two_that_compute_the_same(manager)
    compute(manager, second)
    manager.free(second)
    assert manager.take_updates() == []
    third = make_sequence("c", 8, first=50)
    admit(manager, third)
    manager.seal(third, 8)
    manager.free(third)
    manager.finish_step()
    assert manager.take_updates() == []


def test_blocks_are_evicted_from_a_chains_tail() -> None:
    manager = make_manager(4, num_groups=1)
    sequence = make_sequence("a", 16)
    run_and_free(manager, sequence)
    found = []
    for _ in range(4):
        manager.pool.allocate()
        found.append(manager.lookup(sequence).num_blocks)
    assert found == [3, 2, 1, 0]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("num_tokens", "num_shared", "num_copied"), [(3, 0, 1), (8, 2, 0), (10, 2, 1)])
def test_fork_shares_full_blocks_and_copies_the_open_one(
    num_tokens: int, num_shared: int, num_copied: int, num_groups: int
) -> None:
    """The parent has gone on meanwhile: the child gets the prompt, not the parent's output."""
    manager = make_manager(num_groups=num_groups)
    parent, child = make_sequence("a", num_tokens), make_sequence("b", num_tokens)
    admit(manager, parent)
    compute(manager, parent)
    for token in range(5):
        parent.append(token)
    manager.extend(parent, parent.num_tokens)
    copies = manager.fork(parent, child)
    expected = []
    for theirs, own in zip(manager.table(parent).block_ids, manager.table(child).block_ids, strict=True):
        assert own[:num_shared] == theirs[:num_shared]
        assert len(own) == num_shared + num_copied
        assert not set(own[num_shared:]) & set(theirs)
        expected += [(theirs[index], own[index]) for index in range(num_shared, len(own))]
    assert copies == expected
    manager.check_integrity()


def test_fork_without_room_changes_nothing() -> None:
    """A full prompt needs no block; an open one needs one for each group."""
    manager = make_manager(5, num_groups=2)
    parent, child = make_sequence("a", 6), make_sequence("b", 6)
    admit(manager, parent)
    compute(manager, parent)
    assert not manager.fits_fork(child)
    assert manager.fork(parent, child) is None
    assert manager.pool.num_free == 1
    assert manager.fits_fork(make_sequence("c", 8))
    manager.check_integrity()


def test_check_finds_a_block_that_no_table_holds() -> None:
    manager = make_manager()
    admit(manager, make_sequence("a", 4))
    manager.pool.allocate()
    with pytest.raises(IntegrityError, match="0 holders"):
        manager.check_integrity()


def test_check_finds_an_uneven_table() -> None:
    manager = make_manager(num_groups=2)
    sequence = make_sequence("a", 8)
    admit(manager, sequence)
    manager.pool.release(manager.table(sequence).groups[1].pop())
    with pytest.raises(IntegrityError, match="uneven"):
        manager.check_integrity()
