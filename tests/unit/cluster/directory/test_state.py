"""Placements that see each other, and what a directory answers."""

from typing import Any

import pytest
from told_directory import (
    BLOCK_SIZE,
    CLEARED,
    Cluster,
    stored,
)

from pagoda.cluster.directory.checks import MAX_HASHES, UnknownModelError
from pagoda.proto import directory_pb2 as pb
from pagoda.worker.errors import InvalidRequestError


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
    assert cluster.state.workers.live_at == {"r": other}
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


def test_who_asks_again_is_counted_once(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.place("r", 1, 2)
    stats = cluster.state.stats(cluster.now_s)
    assert sum(stats.placements.values()) == sum(worker.placements for worker in stats.workers) == 1
    assert stats.placed_tokens == sum(worker.placed_tokens for worker in stats.workers) == 33


def test_excluded_names_that_nobody_knows_are_not_kept(cluster: Cluster) -> None:
    answer = cluster.place("r", 1, exclude=["a", *(f"unknown {number}" for number in range(1000))])
    assert answer.ranked == ["b"]
    reservation = cluster.state._reservations.get("r")
    assert reservation is not None
    assert reservation.not_at == {"a"}


def test_slots_are_used_again_while_nobody_asks(cluster: Cluster) -> None:
    """Scenario: a worker that stores and clears all day, and no requests."""
    for seq in range(1, 201):
        cluster.events("a", seq, stored(1, 2), CLEARED)
        cluster.now_s += 1.0
        cluster.state.tick(cluster.now_s)
        cluster.load("b")
        while cluster.state.workers.sweep():
            pass
    assert max(record.slot for record in cluster.state.workers.by_id.values()) < 20


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
