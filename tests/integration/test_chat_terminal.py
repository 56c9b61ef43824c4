"""`pagoda chat` as its users meet it: in a terminal, and with a real model behind it."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_openai import fake_openai, piece, usage
from local_server import DEADLINE_S, LocalServer, serve_locally, tiny_engine_config

from pagoda.cluster.cli import main

IN_TERMINAL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that a Ctrl-C typed there reaches us
signal.signal(signal.SIGINT, signal.default_int_handler)  # also if these tests run in the background of a shell
from pagoda.cluster.cli import main
main()
"""


class Terminal:
    """The other side of a program's terminal."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._seen = ""

    def expect(self, text: str) -> None:
        """Read until `text` appears behind what was expected before."""
        while text not in self._seen:
            assert select.select([self._file], [], [], DEADLINE_S)[0], f"{text!r} did not appear: {self._seen!r}"
            self._seen += os.read(self._file, 4096).decode(errors="replace")
        self._seen = self._seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())


@contextmanager
def in_terminal(*arguments: str) -> Iterator[Terminal]:
    """A `pagoda` command that must end well by the end of the block."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, *arguments]
    program = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        yield Terminal(ours)
        assert program.wait(DEADLINE_S) == 0
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_in_a_terminal() -> None:
    """Ctrl-C stops an answer (the server sees the connection close), and only that; at the prompt it drops the line.
    An error does not end the conversation. Ctrl-D does."""
    whole = [piece("all of it"), piece("", "stop"), usage(prompt=9, output=3, cached=8), "data: [DONE]\n\n"]
    with fake_openai("tiny") as server:
        server.answers = [[piece("the first half"), "HANG"], (429, "full"), whole]
        with in_terminal("chat", "--url", server.url) as terminal:
            terminal.expect("> ")
            terminal.type("one\n")
            terminal.expect("the first half")
            terminal.type("\x03")
            assert server.client_left.wait(DEADLINE_S)
            terminal.expect("stopped]")
            terminal.expect("> ")
            terminal.type("a mistake\x03")
            terminal.expect("Ctrl-D leaves")
            terminal.expect("> ")
            terminal.type("two\n")
            terminal.expect("answers 429: full")
            terminal.expect("> ")
            terminal.type("three\n")
            terminal.expect("all of it")
            terminal.expect("8 of 9 prompt tokens cached")
            terminal.expect("> ")
            terminal.type("\x04")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["one", "the first half", "three"]


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[LocalServer]:
    with serve_locally(tiny_engine_config(tiny), model_name="tiny") as server:
        yield server


def test_with_a_model(server: LocalServer) -> None:
    """Two turns through tokenizer, engine and API; the second finds the first in the cache."""
    message = "Tell me a very long story about a pagoda, please. " * 3
    result = CliRunner().invoke(
        main,
        ["chat", "--url", f"http://127.0.0.1:{server.port}", "--max-tokens", "24", "--temperature", "0"],
        input=f"{message}\n{message}\n",
    )
    assert result.exit_code == 0, result.output
    first, second = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert " 0 of " in first
    num_cached, num_prompt = (int(word) for word in second.split(" · ")[-2 if "cut" in second else -1].split()[::2][:2])
    assert 32 <= num_cached < num_prompt
    server.wait_until_idle()
