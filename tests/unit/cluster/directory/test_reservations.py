"""A reservation ends in exactly one way, whoever says so first."""

import pytest

from pagoda.cluster.directory.reservations import Reservation, Reservations


def reservation(request_id: str = "r", worker_id: str = "a", deadline_s: float = 10.0) -> Reservation:
    return Reservation(request_id, worker_id, 100, 5000, 2, 9, deadline_s)


def test_counts_until_it_ends() -> None:
    reservations = Reservations()
    reservations.reserve(reservation("r1"))
    reservations.reserve(reservation("r2"))
    load = reservations.load_of("a")
    assert (load.num_uncached_tokens, load.num_sequences, load.num_blocks) == (200, 4, 18)
    reservations.end(["r1"], "admitted")
    reservations.end(["r1", "r1", "unknown"], "finished")
    assert reservations.load_of("a").num_uncached_tokens == 100
    assert (reservations.ends["admitted"], reservations.ends["finished"]) == (1, 0)


def test_placed_again_elsewhere_counts_once() -> None:
    reservations = Reservations()
    reservations.reserve(reservation(worker_id="a"))
    reservations.reserve(reservation(worker_id="b"))
    assert reservations.load_of("a").num_sequences == 0
    assert reservations.load_of("b").num_sequences == 2
    assert len(reservations) == 1


def test_deadline_is_the_backstop() -> None:
    reservations = Reservations()
    for number in range(5):
        reservations.reserve(reservation(str(number), deadline_s=number))
    assert reservations.expire(2.5) == 3
    assert reservations.load_of("a").num_sequences == 4
    assert reservations.expire(2.5) == 0


def test_worker_lost() -> None:
    reservations = Reservations()
    reservations.reserve(reservation("r1", "a"))
    reservations.reserve(reservation("r2", "b"))
    reservations.drop_worker("a")
    assert reservations.get("r1") is None
    assert reservations.load_of("a").num_sequences == 0
    assert reservations.load_of("b").num_sequences == 2
    reservations.end(["r1"], "finished")
    assert reservations.ends == {"worker_lost": 1}


@pytest.mark.parametrize("worker_id", ["a", "never heard of"])
def test_nothing_reserved(worker_id: str) -> None:
    assert Reservations().load_of(worker_id).num_uncached_tokens == 0
