"""How the ranks of one worker talk: one TCP connection from each of them to the first.

    first rank                                        another rank
    RankListener                <-- who are you -->   connect(seat)          both show that they know the token
                                <-- HELLO rank ----
    where the ranks meet        --- MEET port ---->   joins the process group, loads its share
                                <-- READY ---------
    each step                   --- PLAN --------->   executes it
                                <-- DONE ----------   now and then, so that nobody runs far ahead
    each second, also in a step --- PING --------->
                                <-- PONG ----------
    at the end                  --- END ---------->   ends

A rank that fails says FAILED and why. A connection that ends, ends whoever is at its other end: ranks live and die
together. Messages are bytes with their length before them, the first byte is their kind; nothing that comes from the
network is unpickled. Standard library only.
"""

import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from pagoda.worker.errors import RankLostError

CONNECT_DEADLINE_S = 30.0
"""For one connection, from dialling to HELLO."""
_SILENCE_S = 5.0
"""How long whoever connects may let the listener wait for each of its answers."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A machine that vanishes closes no connection: seconds until it is asked for, between two questions, and how many."""
_POLL_S = 0.1
_MAX_HELLO_BYTES = 16


class Kind(IntEnum):
    """What a message is; the comment says what follows."""

    HELLO = 1  # the rank, in decimal digits
    MEET = 2  # the port of the ranks' meeting point, in decimal digits
    READY = 3
    PLAN = 4  # as `StepEncoder` writes it
    DONE = 5
    PING = 6
    PONG = 7
    END = 8
    FAILED = 9  # why, in UTF-8


@dataclass(frozen=True, slots=True)
class RankSeat:
    """Which rank a process is to be, and how it reaches the first one."""

    rank: int
    size: int
    """Ranks in all."""
    host: str
    port: int
    token: bytes = field(repr=False)
    """What both ends of the connection must show each other."""


class RankLink:
    """One end of a connection. Anybody may send, one thread receives, and that one, or none, closes."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes the socket over."""
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._sending = threading.Lock()

    def ask_for_token(self, token: bytes) -> None:
        """Raises `AuthenticationError` unless the other end knows the token."""
        deliver_challenge(self._connection, token)

    def show_token(self, token: bytes) -> None:
        """The answer to `ask_for_token`, without telling the token itself."""
        answer_challenge(self._connection, token)

    def limit_silence(self, limit_s: float) -> None:
        """From now on whoever receives gets OSError after so long without a byte; 0 lets it wait for ever."""
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Waits while the other end does not read. Raises OSError if it is gone, or gets to be."""
        with self._sending:
            self._connection.send_bytes(bytes([kind]) + body)

    def try_send(self, kind: Kind) -> None:
        """Send, unless that would have to wait. Raises OSError if the other end is gone."""
        if self._sending.acquire(blocking=False):
            try:
                poll = select.poll()
                poll.register(self._connection.fileno(), select.POLLOUT)
                if poll.poll(0):
                    self._connection.send_bytes(bytes([kind]))
            finally:
                self._sending.release()

    def receive(self, max_bytes: int | None = None) -> tuple[Kind, bytes]:
        """The next message. Raises OSError or EOFError once the other end is gone, or this one has hung up."""
        data = self._connection.recv_bytes(max_bytes)
        try:
            return Kind(data[0]), data[1:]
        except (IndexError, ValueError) as error:
            raise OSError("not one of our messages") from error

    def hang_up(self) -> None:
        """End the connection, for whoever waits at either end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and give the descriptors back."""
        self.hang_up()
        with self._sending:
            self._connection.close()
            self._socket.close()


def connect(seat: RankSeat) -> RankLink:
    """Dial the first rank and say who we are. Raises OSError or `AuthenticationError`."""
    link = RankLink(socket.create_connection((seat.host, seat.port), CONNECT_DEADLINE_S))
    try:
        link.limit_silence(_SILENCE_S)
        link.show_token(seat.token)
        link.ask_for_token(seat.token)
        link.send(Kind.HELLO, str(seat.rank).encode())
        link.limit_silence(0)
    except BaseException:
        link.close()
        raise
    return link


class RankListener:
    """Where the other ranks dial. Whoever does not know the token is sent away and keeps nobody waiting."""

    def __init__(self, host: str, *, size: int, token: bytes) -> None:
        """Listen on a free port of `host` for the ranks from 1 to `size` - 1."""
        self._token = token
        self._missing = set(range(1, size))
        self._listener = socket.create_server((host, 0), backlog=size + 16)
        self.port: int = self._listener.getsockname()[1]
        self._arrived: queue.SimpleQueue[tuple[int, RankLink]] = queue.SimpleQueue()

    def accept_all(self, deadline_s: float, problem: Callable[[], str | None]) -> dict[int, RankLink]:
        """Wait for all ranks, then listen no more. `problem` says why waiting is of no use, if it is not.

        Raises `RankLostError`, saying which rank is missing.
        """
        links: dict[int, RankLink] = {}
        end = time.monotonic() + deadline_s
        self._listener.settimeout(_POLL_S)
        try:
            while self._missing:
                with suppress(TimeoutError):
                    connected, _ = self._listener.accept()
                    threading.Thread(target=self._greet, args=(connected,), name="rank-greeting", daemon=True).start()
                while not self._arrived.empty():
                    rank, link = self._arrived.get()
                    if rank in self._missing:
                        self._missing.remove(rank)
                        links[rank] = link
                    else:
                        link.close()
                if self._missing and (why := problem()) is not None:
                    raise RankLostError(why)
                if self._missing and time.monotonic() > end:
                    missing = ", ".join(map(str, sorted(self._missing)))
                    raise RankLostError(f"rank {missing} did not come within {deadline_s:.0f} s")
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            self.close()
        return links

    def close(self) -> None:
        """Listen no more; `accept_all` does so itself."""
        self._listener.close()

    def _greet(self, connected: socket.socket) -> None:
        link = RankLink(connected)
        try:
            link.limit_silence(_SILENCE_S)
            link.ask_for_token(self._token)
            link.show_token(self._token)
            kind, body = link.receive(_MAX_HELLO_BYTES)
            link.limit_silence(0)
            self._arrived.put((int(body) if kind is Kind.HELLO else 0, link))
        except (OSError, EOFError, ValueError, AuthenticationError):
            link.close()
