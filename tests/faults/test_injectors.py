"""Faults are what they claim to be."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import empty, fill, small_disk
from partition import Network, network
from processes import children_of, command_of, kill, paused, usage_of

ECHO = "import sys\nprint('here', flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    """A process that says what it hears."""
    with subprocess.Popen(
        [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_paused_process_goes_on(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    with paused(child.pid):
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert state_of(child.pid) == "T"
        child.stdin.write("x\n")
        child.stdin.flush()
    assert child.stdout.readline() == "x\n"


def test_a_killed_process_is_gone(child: "subprocess.Popen[str]") -> None:
    assert child.pid in children_of(os.getpid())
    assert "sys.stdin" in command_of(child.pid)
    usage = usage_of(child.pid)
    assert usage.rss_bytes > 2**20
    assert usage.num_files >= 3
    assert usage.num_threads == 1
    assert kill(child.pid)
    assert child.wait() == -signal.SIGKILL
    assert not kill(child.pid)
    assert usage_of(child.pid).rss_bytes == 0
    with paused(child.pid):
        pass  # as if nothing had been


def test_a_full_disk_takes_nothing_until_it_is_empty(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk", size_bytes=2**20) as disk:
            (disk / "before").write_bytes(b"a")
            fill(disk)
            with pytest.raises(OSError, match="No space") as error:
                (disk / "after").write_bytes(bytes(4096))
            assert error.value.errno == errno.ENOSPC
            empty(disk)
            (disk / "after").write_bytes(bytes(4096))
    except PermissionError as error:
        pytest.skip(f"no file system may be mounted: {error}")


@pytest.fixture
def other_network() -> Iterator[Network]:
    try:
        with network() as one:
            yield one
    except PermissionError as error:
        pytest.skip(f"no network namespace may be made: {error}")


def test_a_pulled_cable_can_be_plugged_again(other_network: Network) -> None:
    """A connection over it neither breaks nor brings anything meanwhile."""
    code = (
        "import socket\n"
        f"listener = socket.create_server(('{other_network.their_address}', 0))\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "connection, _ = listener.accept()\n"
        "while data := connection.recv(100): connection.sendall(data)\n"
    )
    command = other_network.command(sys.executable, "-c", code)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = (other_network.their_address, int(process.stdout.readline()))
        with socket.create_connection(address, 10) as connection:
            connection.sendall(b"a")
            assert connection.recv(10) == b"a"
            other_network.pull()
            connection.settimeout(0.2)
            connection.sendall(b"b")
            with pytest.raises(TimeoutError):
                connection.recv(10)
            other_network.plug()
            connection.settimeout(20)
            assert connection.recv(10) == b"b"
