"""Ranks dial the first one; nobody else gets in or keeps them waiting."""

import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest

from pagoda.worker import rank_link
from pagoda.worker.errors import RankLostError
from pagoda.worker.rank_link import Kind, RankLink, RankListener, RankSeat, connect

TOKEN = b"what only ranks know"
DEADLINE_S = 30.0


class FirstRank:
    """Listens on a thread of its own."""

    def __init__(self, size: int) -> None:
        self._listener = RankListener("127.0.0.1", size=size, token=TOKEN)
        self.port = self._listener.port
        self.links: dict[int, RankLink] = {}
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(RankLostError):
            self.links = self._listener.accept_all(DEADLINE_S, lambda: self._problem)

    def seat(self, rank: int) -> RankSeat:
        return RankSeat(rank, 3, "127.0.0.1", self.port, TOKEN)

    def wait(self) -> dict[int, RankLink]:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.links

    def give_up(self) -> None:
        self._problem = "the test is over"
        self._thread.join(DEADLINE_S)
        for link in self.links.values():
            link.close()


@pytest.fixture
def first() -> Iterator[FirstRank]:
    listening = FirstRank(3)
    yield listening
    listening.give_up()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def dial(seat: RankSeat, closing: ExitStack) -> RankLink:
    link = connect(seat)
    closing.callback(link.close)
    return link


def test_messages_arrive_whole_and_in_order(first: FirstRank, closing: ExitStack) -> None:
    """Ranks come in any order; a message may be larger than all buffers, if it is read."""
    second, other = dial(first.seat(2), closing), dial(first.seat(1), closing)
    links = first.wait()
    assert links.keys() == {1, 2}
    large = bytes(range(256)) * 40_000
    sending = threading.Thread(target=lambda: [links[2].send(Kind.PLAN, large), links[2].send(Kind.END)])
    sending.start()
    assert second.receive() == (Kind.PLAN, large)
    assert second.receive() == (Kind.END, b"")
    sending.join(DEADLINE_S)
    other.send(Kind.FAILED, "schlägt fehl".encode())
    assert links[1].receive() == (Kind.FAILED, "schlägt fehl".encode())


def test_wrong_token_is_refused_and_disturbs_nobody(first: FirstRank, closing: ExitStack) -> None:
    dial(first.seat(1), closing)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(replace(first.seat(2), token=b"a guess"))
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(replace(first.seat(1), token=b""))
    dial(first.seat(2), closing)
    assert first.wait().keys() == {1, 2}


def test_listener_that_does_not_know_the_token(closing: ExitStack) -> None:
    """A rank shows no more than that it knows the token, and gives no answer to whoever does not."""
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    errors: list[BaseException] = []

    def listen() -> None:
        connected, _ = listener.accept()
        link = RankLink(connected)
        try:
            link.limit_silence(DEADLINE_S)
            link.ask_for_token(b"a guess")
        except (AuthenticationError, EOFError, OSError) as error:
            errors.append(error)
        finally:
            link.close()

    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(RankSeat(1, 2, "127.0.0.1", listener.getsockname()[1], TOKEN))
    thread.join(DEADLINE_S)
    assert len(errors) == 1


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x02hi"])
def test_strangers_keep_nobody_waiting(first: FirstRank, closing: ExitStack, sent: bytes) -> None:
    """They say nothing, or what they like, and stay."""
    for _ in range(20):
        stranger = closing.enter_context(socket.create_connection(("127.0.0.1", first.port)))
        stranger.sendall(sent)
    for rank in (1, 2):
        dial(first.seat(rank), closing)
    assert first.wait().keys() == {1, 2}


def test_silent_stranger_is_let_go(first: FirstRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "_SILENCE_S", 0.1)
    with socket.create_connection(("127.0.0.1", first.port), DEADLINE_S) as stranger:
        while stranger.recv(1000):
            pass


def test_only_the_ranks_that_are_missing_get_in(first: FirstRank, closing: ExitStack) -> None:
    """Each of them once."""
    dial(first.seat(1), closing)
    for rank in (0, 1, 3, -1):
        extra = dial(first.seat(rank), closing)
        with pytest.raises((EOFError, OSError)):
            extra.receive()
    dial(first.seat(2), closing)
    assert first.wait().keys() == {1, 2}


def test_nothing_is_unpickled(first: FirstRank, closing: ExitStack) -> None:
    """Not even from somebody who knows the token."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("unpickled",))

    client = closing.enter_context(Client(("127.0.0.1", first.port), authkey=TOKEN))
    client.send_bytes(pickle.dumps(Bomb()))
    with pytest.raises((EOFError, OSError)):
        client.recv_bytes()
    for rank in (1, 2):
        dial(first.seat(rank), closing)
    assert first.wait().keys() == {1, 2}


def test_link_that_ends_is_heard_at_the_other_end(first: FirstRank, closing: ExitStack) -> None:
    ranks = {rank: dial(first.seat(rank), closing) for rank in (1, 2)}
    links = first.wait()
    ranks[1].hang_up()
    with pytest.raises((EOFError, OSError)):
        links[1].receive()

    def wait() -> None:
        with suppress(EOFError, OSError):
            links[2].receive()

    waiting = threading.Thread(target=wait)
    waiting.start()
    links[2].hang_up()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    with pytest.raises((EOFError, OSError)):
        ranks[2].receive()


def test_who_must_not_wait_does_not(first: FirstRank, closing: ExitStack) -> None:
    """The other end reads nothing: one thread waits for it, another asks whether it is there and goes on."""
    for rank in (1, 2):
        dial(first.seat(rank), closing)
    link = first.wait()[1]

    def send() -> None:
        with suppress(OSError):
            link.send(Kind.PLAN, bytes(2**26))

    stuck = threading.Thread(target=send)
    stuck.start()
    for _ in range(100):
        link.try_send(Kind.PING)
    assert stuck.is_alive()
    link.hang_up()
    stuck.join(DEADLINE_S)
    assert not stuck.is_alive()


def test_token_is_in_no_log(first: FirstRank) -> None:
    assert TOKEN.decode() not in repr(first.seat(1))


def test_problem_ends_the_waiting() -> None:
    listener = RankListener("127.0.0.1", size=2, token=TOKEN)
    with pytest.raises(RankLostError, match="the process of rank 1 ended"):
        listener.accept_all(DEADLINE_S, lambda: "the process of rank 1 ended")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", listener.port), DEADLINE_S)
