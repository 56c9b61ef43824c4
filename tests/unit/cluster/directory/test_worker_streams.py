"""What workers tell a directory: streams with gaps and restarts, snapshots that break off, nonsense."""

from typing import Any

import pytest
from told_directory import (
    CLEARED,
    DATA_LOSS,
    OUT_OF_RANGE,
    Cluster,
    key,
    keys,
    removed,
    stored,
)

from pagoda.cluster.directory.checks import MismatchError, StaleEpochError, UnknownModelError
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.errors import InvalidRequestError


def test_events_in_order(cluster: Cluster) -> None:
    assert cluster.events("a", 1, stored(1, 2, 3)) is None
    assert cluster.events("a", 2, removed(3), stored(4)) is None
    assert cluster.held(1, 2, 3) == {"a": 2, "b": 0}
    assert cluster.worker("a").is_exact


def test_what_comes_twice_counts_once(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(1))
    cluster.events("a", 2, removed(1))
    assert cluster.events("a", 1, stored(1)) is None
    assert cluster.held(1) == {"a": 0, "b": 0}
    assert cluster.state.stats(cluster.now_s).stream_events["duplicate"] == 1


def test_gap_is_mended_by_the_missing_batches(cluster: Cluster) -> None:
    """Said once, not for every batch that is under way; meanwhile the worker is degraded, not forgotten."""
    cluster.events("a", 1, stored(1))
    assert cluster.events("a", 3, stored(3)) == OUT_OF_RANGE
    assert cluster.events("a", 4, stored(4)) is None
    assert not cluster.worker("a").is_exact
    assert cluster.held(1) == {"a": 1, "b": 0}
    for seq in (2, 3, 4):
        assert cluster.events("a", seq, stored(seq)) is None
    assert cluster.held(1, 2, 3, 4) == {"a": 4, "b": 0}
    assert cluster.worker("a").is_exact


def test_gap_that_nobody_mends_is_a_loss(cluster: Cluster) -> None:
    assert cluster.events("a", 2, stored(2)) == OUT_OF_RANGE
    cluster.now_s += 1.5
    assert cluster.events("a", 3, stored(3)) == DATA_LOSS


def test_a_lost_batch_is_noticed_even_if_none_follows(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(1))
    assert cluster.send("a", load=pb.LoadReport(last_seq=2)) == OUT_OF_RANGE
    assert not cluster.worker("a").is_exact
    cluster.events("a", 2, stored(2))
    assert cluster.worker("a").is_exact
    assert cluster.send("a", load=pb.LoadReport(last_seq=2)) is None


def test_a_stream_that_breaks_in_a_snapshot(cluster: Cluster) -> None:
    """Half a snapshot is none: what is missing of it comes again, from the first batch or as another one."""
    cluster.events("a", 1, stored(1, 2))
    cluster.send("a", snapshot=pb.Snapshot(epoch=1, seq=1, blocks=[pb.Blocks(hashes=key(1))], is_first=True))
    assert cluster.hello("a", last_seq=1).last_seq == 0
    assert not cluster.worker("a").is_exact
    assert cluster.held(1)["a"] == 0
    cluster.events("a", 1, stored(1, 2))
    assert (cluster.held(1, 2)["a"], cluster.worker("a").is_exact) == (2, True)


def test_exact_means_all_that_is_known_to_exist(cluster: Cluster) -> None:
    """Not the first of the missing batches, nor what an earlier stream said of itself."""
    for _ in range(2):
        cluster.hello("a", last_seq=cluster.worker("a").last_seq)
        last = cluster.worker("a").last_seq
        assert cluster.events("a", last + 3, stored(3)) == OUT_OF_RANGE
        for seq in (last + 1, last + 2):
            cluster.events("a", seq, stored(seq))
            assert not cluster.worker("a").is_exact
        cluster.events("a", last + 3, stored(3))
        assert cluster.worker("a").is_exact
    with pytest.raises(MismatchError, match="block_size"):
        cluster.hello("a", block_size=32)


def test_a_directory_that_slept_blames_nobody(cluster: Cluster) -> None:
    """Scenario: it was stopped for a minute, and what workers said meanwhile is still to be read."""
    cluster.state.tick(cluster.now_s)
    cluster.now_s += 60.0
    cluster.state.tick(cluster.now_s)
    assert set(cluster.held(1)) == {"a", "b"}
    for _ in range(8):
        cluster.now_s += 0.5
        cluster.state.tick(cluster.now_s)
    with pytest.raises(UnknownModelError):
        cluster.held(1)


def test_snapshot_carries_the_true_last_number(cluster: Cluster) -> None:
    """Scenario: dynamo #7072. What it contains is not counted again, and what follows it is no gap."""
    cluster.events("a", 1, stored(1, 2))
    cluster.events("a", 7, stored(9))
    blocks = [pb.Blocks(hashes=keys(2, 3))]
    cluster.send("a", snapshot=pb.Snapshot(epoch=1, seq=7, blocks=blocks, is_first=True))
    assert not cluster.worker("a").is_exact
    cluster.send("a", snapshot=pb.Snapshot(epoch=1, seq=7, blocks=[pb.Blocks(hashes=keys(4))], is_last=True))
    assert (cluster.held(1)["a"], cluster.held(2, 3, 4)["a"]) == (0, 3)
    assert cluster.worker("a").is_exact
    assert cluster.events("a", 7, removed(2)) is None
    assert cluster.events("a", 8, stored(5)) is None
    assert cluster.held(2, 3, 4, 5)["a"] == 4


def test_epoch(cluster: Cluster) -> None:
    """Scenario: llm-d-router #2853. A worker that starts anew loses the credit for what it held."""
    cluster.events("a", 1, stored(1))
    cluster.hello("a", epoch=2)
    assert cluster.held(1) == {"a": 0, "b": 0}
    assert cluster.events("a", 1, stored(2), epoch=2) is None
    assert cluster.held(2)["a"] == 1
    with pytest.raises(StaleEpochError, match="epoch"):
        cluster.hello("a", epoch=1)
    with pytest.raises(InvalidRequestError, match=r"events\.epoch"):
        cluster.events("a", 2, stored(3), epoch=1)


def test_a_stream_that_broke_goes_on_where_it_was(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(1))
    old, old_stream = cluster.streams["a"]
    assert cluster.hello("a", last_seq=2).last_seq == 1
    assert not cluster.worker("a").is_exact
    assert not cluster.state.workers.is_current(old, old_stream)
    cluster.events("a", 2, stored(2))
    assert cluster.held(1, 2)["a"] == 2
    assert cluster.worker("a").is_exact


def test_lease(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(1))
    cluster.place("r", 1)
    for _ in range(6):
        assert set(cluster.held(1)) == {"a", "b"}
        cluster.now_s += 0.5
        cluster.load("b")
        cluster.state.tick(cluster.now_s)
    cluster.now_s += 0.1
    cluster.state.tick(cluster.now_s)
    assert cluster.held(1) == {"b": 0}
    assert cluster.place("r", 1).ranked == ["b"]


def test_goodbye_and_sweep(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(*range(100)))
    cluster.events("b", 1, stored(1))
    cluster.send("a", goodbye=pb.Goodbye())
    assert cluster.held(1) == {"b": 1}
    while cluster.state.workers.sweep():
        pass
    assert cluster.state.stats(cluster.now_s).num_entries == 1


def test_everything_cleared(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(1, 2))
    cluster.events("a", 2, CLEARED, CLEARED, stored(2))
    assert (cluster.held(1)["a"], cluster.held(2)["a"]) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"block_size": 32}, "block_size"), ({"windows": [0, 4]}, "windows")],
)
def test_blocks_of_another_kind(cluster: Cluster, changes: dict[str, Any], field: str) -> None:
    """Scenario: block sizes differ and every hit is silently missed. Refused, loudly; another model may have any."""
    with pytest.raises(MismatchError, match=field):
        cluster.hello("c", **changes)
    cluster.hello("c", model="other", **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "hello.worker_id"),
        ({"worker_id": "x" * 257}, "hello.worker_id"),
        ({"model": ""}, "hello.model"),
        ({"epoch": 0}, "hello.epoch"),
        ({"block_size": 0}, "hello.block_size"),
        ({"windows": []}, "hello.windows"),
        ({"layout": b"15 bytes of it"}, "hello.layout"),
        ({"windows": [0] * 65}, "hello.windows"),
        ({"num_blocks": 0}, "hello.num_blocks"),
        ({"max_num_seqs": 0}, "hello.max_num_seqs"),
    ],
)
def test_bad_hello(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        Cluster().hello(**{"worker_id": "a"} | changes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({}, "update"),
        ({"hello": pb.Hello()}, "update"),
        ({"events": pb.EventBatch(epoch=1, seq=1, events=[pb.BlockEvent()])}, "events.events"),
        ({"snapshot": pb.Snapshot(epoch=1, seq=1)}, "snapshot.is_first"),
        ({"load": pb.LoadReport(admitted=["x" * 257])}, "load.admitted"),
        ({"load": pb.LoadReport(admitted=["r"] * 100_001)}, "load.admitted"),
        *(
            ({"load": pb.LoadReport(rates=pb.Rates(step_s_per_sequence=rate))}, "load.rates.step_s_per_sequence")
            for rate in (float("nan"), float("inf"), -1.0)
        ),
        ({"events": pb.EventBatch(epoch=1, seq=1, events=[CLEARED] * 65)}, "events.events"),
        ({"snapshot": pb.Snapshot(epoch=2, seq=1, is_first=True)}, "snapshot.epoch"),
        *(
            ({"events": pb.EventBatch(epoch=1, seq=1, events=[pb.BlockEvent(stored=blocks)])}, field)
            for blocks, field in (
                (pb.Blocks(hashes=b"x" * 17), "hashes"),
                (pb.Blocks(group=1, hashes=key(1)), "blocks.group"),
                (pb.Blocks(tier=7, hashes=key(1)), "blocks.tier"),
            )
        ),
    ],
)
def test_bad_update(cluster: Cluster, update: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        cluster.send("a", **update)
    assert error.value.field == field


def test_more_than_a_worker_may_hold(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out and counted; the directory does not grow without bound."""
    monkeypatch.setattr("pagoda.cluster.directory.worker_streams.MAX_WORKER_ENTRIES", 3)
    cluster.events("a", 1, stored(1, 2))
    cluster.events("a", 2, stored(3, 4, 5))
    assert cluster.held(1, 2, 3, 4)["a"] == 3
    assert cluster.state.stats(cluster.now_s).stream_events["over_bound"] == 1


def test_workers_with_more_ranks_share_keys_and_not_bytes(cluster: Cluster) -> None:
    """One model, once on one rank and once on two: each other's prefixes are found, and told apart by their layout."""
    whole, shard = bytes(16), bytes([1]) * 16
    cluster.hello("a", epoch=2, fingerprint=bytes(16), layout=whole, tensor_parallel_size=1)
    cluster.hello("b", epoch=2, fingerprint=bytes(16), layout=shard, tensor_parallel_size=2)
    for name, numbers in (("a", (1, 2)), ("b", (1, 2, 3))):
        cluster.send(
            name, events=pb.EventBatch(epoch=2, seq=1, events=[pb.BlockEvent(stored=pb.Blocks(hashes=keys(*numbers)))])
        )
    assert cluster.held(1, 2, 3) == {"a": 2, "b": 3}
    told = {worker.worker_id: (worker.layout, worker.tensor_parallel_size) for worker in map(cluster.worker, "ab")}
    assert told == {"a": (whole, 1), "b": (shard, 2)}
