"""The publisher's journal: recent batches, and all that they have come to."""

from pagoda.cluster.directory.publisher import Journal
from pagoda.worker.block_hash import BlockHash
from pagoda.worker.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def stored(*numbers: int, group: int = 0) -> BlockStored:
    return BlockStored(group, tuple(map(block, numbers)))


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(0, tuple(map(block, numbers)))


def held(journal: Journal) -> set[tuple[int, int]]:
    return {
        (group, int.from_bytes(packed[start : start + 16], "little"))
        for group, packed in journal.snapshot()
        for start in range(0, len(packed), 16)
    }


def test_snapshot_is_what_the_batches_come_to() -> None:
    journal = Journal()
    journal.append([stored(1, 2), removed(1), stored(3, group=1)])
    journal.append([removed(7), stored(1)])
    assert held(journal) == {(0, 2), (0, 1), (1, 3)}
    journal.append([AllBlocksCleared(), stored(9)])
    assert held(journal) == {(0, 9)}
    assert (journal.first_seq, journal.last_seq) == (1, 3)
    assert journal.batch(2) == [removed(7), stored(1)]


def test_bounds() -> None:
    """Of batches and of blocks; what was forgotten is still in the snapshot."""
    journal = Journal(max_batches=3, max_blocks=5)
    for number in range(5):
        journal.append([stored(number)])
    assert (journal.first_seq, journal.last_seq) == (3, 5)
    journal.append([stored(10, 11, 12, 13)])
    assert journal.first_seq == 5
    assert held(journal) == {(0, number) for number in (0, 1, 2, 3, 4, 10, 11, 12, 13)}
    journal.append([stored(*range(20, 30))])  # more than the journal keeps of all
    assert journal.first_seq == 8


def test_changes_become_events() -> None:
    log = KVEventLog([0, None, 1])
    log.stored(0, block(1))
    log.stored(0, block(2))
    log.removed(0, block(1))
    log.stored(1, block(1))  # another group speaks for this one
    log.stored(2, block(1))
    assert log.take() == [stored(1, 2), removed(1), stored(1, group=1)]
    log.stored(0, block(1))
    log.cleared()
    log.stored(0, block(3))
    assert log.take() == [AllBlocksCleared(), stored(3)]
    assert log.take() == []
