"""The directory without a network: streams of workers with gaps and restarts, and placements that see each other."""

from typing import Any

import pytest

from pagoda.cluster.directory.state import (
    MAX_HASHES,
    DirectoryState,
    MismatchError,
    StaleEpochError,
    UnknownModelError,
    WorkerRecord,
)
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.errors import InvalidRequestError

BLOCK_SIZE = 16
CLEARED = pb.BlockEvent(cleared=pb.AllBlocksCleared())
OK, OUT_OF_RANGE, DATA_LOSS = pb.DirectoryAck.OK, pb.DirectoryAck.OUT_OF_RANGE, pb.DirectoryAck.DATA_LOSS


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def stored(*numbers: int) -> pb.BlockEvent:
    return pb.BlockEvent(stored=pb.Blocks(hashes=keys(*numbers)))


def removed(*numbers: int) -> pb.BlockEvent:
    return pb.BlockEvent(removed=pb.Blocks(hashes=keys(*numbers)))


class Cluster:
    """A directory and what a test tells it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.state = DirectoryState("d", now_s=self.now_s, draw=lambda: 0.5, lease_s=3.0, reservation_s=30.0)
        self.streams: dict[str, tuple[WorkerRecord, int]] = {}

    def hello(self, worker_id: str, **changes: Any) -> pb.DirectoryAck:
        fields: dict[str, Any] = {
            "worker_id": worker_id, "epoch": 1, "model": "m", "block_size": BLOCK_SIZE, "windows": [0],
            "num_blocks": 1000, "max_num_seqs": 8,
        }  # fmt: skip
        record, stream, ack = self.state.hello(pb.Hello(**fields | changes), self.now_s)
        self.streams[worker_id] = record, stream
        return ack

    def send(self, worker_id: str, **update: Any) -> int | None:
        """The status of the answer, if there is one."""
        ack = self.state.update(self.streams[worker_id][0], pb.WorkerUpdate(**update), self.now_s)
        return None if ack is None else ack.status

    def events(self, worker_id: str, seq: int, *events: pb.BlockEvent, epoch: int = 1) -> int | None:
        return self.send(worker_id, events=pb.EventBatch(epoch=epoch, seq=seq, events=events))

    def load(self, worker_id: str, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "num_free_blocks": 1000, "num_empty_blocks": 1000, "rates": pb.Rates(prefill_s_per_token=1e-3)
        }  # fmt: skip
        self.send(worker_id, load=pb.LoadReport(**defaults | fields))

    def place(self, request_id: str, *numbers: int, **fields: Any) -> pb.PlaceResponse:
        num_tokens = fields.pop("num_tokens", len(numbers) * BLOCK_SIZE + 1)
        request = pb.PlaceRequest(
            request_id=request_id, model="m", hashes=keys(*numbers), num_tokens=num_tokens, **fields
        )
        return self.state.place(request, self.now_s)

    def held(self, *numbers: int) -> dict[str, int]:
        """How many of these blocks each worker holds, from the first on."""
        answer = self.state.lookup(pb.LookupRequest(model="m", hashes=keys(*numbers)), self.now_s)
        return {worker.worker_id: worker.num_blocks for worker in answer.workers}

    def worker(self, worker_id: str) -> pb.WorkerStats:
        (stats,) = (each for each in self.state.stats(self.now_s).workers if each.worker_id == worker_id)
        return stats


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    for worker_id in ("a", "b"):
        cluster.hello(worker_id)
        cluster.load(worker_id)
    return cluster


# -- streams -------------------------------------------------------------------------------------


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
    assert not cluster.state.is_current(old, old_stream)
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
    while cluster.state.sweep():
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
    monkeypatch.setattr("pagoda.cluster.directory.state.MAX_WORKER_ENTRIES", 3)
    cluster.events("a", 1, stored(1, 2))
    cluster.events("a", 2, stored(3, 4, 5))
    assert cluster.held(1, 2, 3, 4)["a"] == 3
    assert cluster.state.stats(cluster.now_s).stream_events["over_bound"] == 1


# -- placements ----------------------------------------------------------------------------------


def test_goes_to_its_prefix(cluster: Cluster) -> None:
    cluster.events("b", 1, stored(1, 2, 3))
    answer = cluster.place("r", 1, 2, 3, 4)
    assert answer.ranked == ["b", "a"]
    assert (answer.reason, answer.plan.cached_tokens, answer.plan.uncached_tokens) == ("prefix", 48, 17)


def test_a_worker_that_has_measured_nothing_is_not_free(cluster: Cluster) -> None:
    """Scenario: the second request of all goes where nothing is known, away from its prefix."""
    cluster.hello("new")
    cluster.events("a", 1, stored(1, 2, 3))
    cluster.load("a", rates=pb.Rates(prefill_s_per_token=0.01))
    assert cluster.place("r", 1, 2, 3).ranked[0] == "a"


def test_reserved_until_the_worker_says_so_itself(cluster: Cluster) -> None:
    """Nothing is counted twice, and nothing is missing in between."""
    where = cluster.place("r", 1, 2, num_samples=3).ranked[0]
    worker = cluster.worker(where)
    assert (worker.reserved_tokens, worker.reserved_sequences) == (33, 3)
    cluster.load(where, num_uncached_tokens=33, num_waiting=3, admitted=["r"])
    worker = cluster.worker(where)
    assert (worker.reserved_tokens, worker.num_uncached_tokens) == (0, 33)
    cluster.load(where, finished=["r"])
    assert cluster.state.stats(cluster.now_s).reservation_ends == {"admitted": 1}


def test_what_a_worker_says_of_a_request_that_it_has_lost_is_old(cluster: Cluster) -> None:
    """Its report comes when the request has long been placed elsewhere."""
    where = cluster.place("r", 1).ranked[0]
    (other,) = cluster.place("r", 1, exclude=[where]).ranked
    cluster.load(where, admitted=["r"])
    cluster.load(where, finished=["r"])
    assert cluster.worker(other).reserved_sequences == 1
    cluster.load(other, admitted=["r"])
    cluster.load(where, is_complete=True)
    assert cluster.state._live_at == {"r": other}
    assert cluster.worker(other).reserved_sequences == 0


def test_load_is_counted_where_it_went(cluster: Cluster) -> None:
    """A worker that another one's request was sent to, as the best one was full: the reservation moves with it."""
    where = cluster.place("r", 1).ranked[0]
    other = "b" if where == "a" else "a"
    cluster.load(other, num_uncached_tokens=17, num_waiting=1, admitted=["r"])
    assert cluster.worker(where).reserved_tokens == 0


def test_simultaneous_requests_see_each_other(cluster: Cluster) -> None:
    places = [cluster.place(f"r{number}", number).ranked[0] for number in range(10)]
    assert places.count("a") == places.count("b") == 5


def test_simultaneous_requests_with_one_prefix_go_together(cluster: Cluster) -> None:
    """Scenario: n samples scatter over cold workers, since the index learns only after events."""
    places = [cluster.place(f"r{number}", *range(1000)) for number in range(4)]
    assert len({answer.ranked[0] for answer in places}) == 1
    assert [answer.plan.uncached_tokens for answer in places] == [16001, 1, 1, 1]
    cluster.now_s += 10.0
    assert cluster.place("later", *range(1000)).plan.uncached_tokens == 16001


def test_asked_again(cluster: Cluster) -> None:
    """`Place` may be repeated: one reservation, at the same worker, unless that is excluded."""
    where = cluster.place("r", 1).ranked[0]
    for _ in range(3):
        assert cluster.place("r", 1).ranked[0] == where
    assert cluster.state.stats(cluster.now_s).reservations == 1
    other = cluster.place("r", 1, exclude=[where]).ranked
    assert where not in other
    assert cluster.worker(where).reserved_sequences == 0


def test_asked_again_while_it_runs(cluster: Cluster) -> None:
    where = cluster.place("r", 1).ranked[0]
    cluster.load(where, num_running=1, admitted=["r"])
    assert cluster.place("r", 1).ranked[0] == where
    assert cluster.state.stats(cluster.now_s).reservations == 0


def test_reservation_that_another_directory_made(cluster: Cluster) -> None:
    answer = cluster.place("r", 1, placed_on="b")
    assert (answer.ranked, answer.reason) == (["b", "a"], "given")
    assert cluster.worker("b").reserved_sequences == 1
    assert cluster.place("s", 1, placed_on="never heard of").reason != "given"


def test_released_and_expired(cluster: Cluster) -> None:
    cluster.place("r1", 1)
    cluster.place("r2", 2, reservation_ms=500)
    cluster.state.release(pb.ReleaseRequest(request_ids=["r1", "unknown"]))
    assert cluster.state.stats(cluster.now_s).reservations == 1
    cluster.now_s += 0.6
    cluster.state.tick(cluster.now_s)
    assert cluster.state.stats(cluster.now_s).reservation_ends == {"released": 1, "expired": 1}


def test_one_long_reservation_keeps_no_other_alive(cluster: Cluster) -> None:
    cluster.place("long", 1, reservation_ms=2**32 - 1, num_samples=2**32 - 1)
    cluster.place("short", 2, reservation_ms=500)
    for seconds, left in ((0.6, 1), (599.0, 1), (1.0, 0)):
        cluster.now_s += seconds
        for worker_id in ("a", "b"):
            cluster.load(worker_id)
        cluster.state.tick(cluster.now_s)
        assert cluster.state.stats(cluster.now_s).reservations == left


def test_totals_do_not_shrink(cluster: Cluster) -> None:
    """When a worker goes; and a request that is placed once more is one request."""
    where = cluster.place("r", 1, 2).ranked[0]
    cluster.place("r", 1, 2)
    cluster.send(where, goodbye=pb.Goodbye())
    assert cluster.state.stats(cluster.now_s).placed_tokens == 33


def test_a_report_of_all_that_is_live_replaces_what_was_known(cluster: Cluster) -> None:
    """After a stream broke, in which ends were lost."""
    cluster.load("a", admitted=["r1", "r2"])
    cluster.load("a", admitted=["r2"], is_complete=True)
    assert cluster.place("r1", 1, exclude=["b"]).ranked == ["a"]
    assert cluster.state.stats(cluster.now_s).reservations == 1


def test_prompt_that_is_too_long_to_look_at(cluster: Cluster) -> None:
    numbers = range(MAX_HASHES + 5)
    cluster.events("a", 1, stored(*numbers))
    answer = cluster.place("r", *numbers)
    assert answer.plan.cached_tokens == MAX_HASHES * BLOCK_SIZE
    assert cluster.state.stats(cluster.now_s).truncated_prompts == 1


def test_hashes_beyond_the_prompt_count_for_nothing(cluster: Cluster) -> None:
    cluster.events("a", 1, stored(1, 2, 3))
    assert cluster.place("r", 1, 2, 3, num_tokens=20).plan.cached_tokens == 16


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"hashes": b"abc"}, "hashes"),
    ],
)
def test_bad_request(cluster: Cluster, fields: dict[str, Any], error: str) -> None:
    request = pb.PlaceRequest(**{"request_id": "r", "model": "m", "num_tokens": 5} | fields)
    with pytest.raises(InvalidRequestError) as raised:
        cluster.state.place(request, cluster.now_s)
    assert raised.value.field == error
    assert cluster.state.stats(cluster.now_s).reservations == 0


def test_nobody_to_place_on(cluster: Cluster) -> None:
    with pytest.raises(UnknownModelError):
        cluster.state.place(pb.PlaceRequest(request_id="r", model="other", num_tokens=5), 0.0)
    with pytest.raises(UnknownModelError):
        cluster.place("r", 1, exclude=["a", "b"])
