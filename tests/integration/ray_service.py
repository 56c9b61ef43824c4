"""Runs `pagoda serve` as a user does: the real command, with a Ray cluster of its own."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from local_server import DEADLINE_S, wait_until
from tiny_model import write_tiny_model

PAGODA = Path(sys.executable).with_name("pagoda")
MODEL = "endless"
START_DEADLINE_S = 120.0
DRAIN_S = 5.0
STOP_DEADLINE_S = DRAIN_S + 10.0
"""The drain time and then a few seconds, whoever still reads or writes."""
ENDLESS = 500_000
"""Tokens that nobody waits for: minutes, where a test waits for seconds."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Service:
    """A `pagoda serve` process, in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, grpc_port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.grpc_port = grpc_port
        self.log = log
        self.silent: socket.socket | None = None
        """A client that has sent half a request when the service came up, and nothing since `silent_since`."""
        self.silent_since = 0.0

    def wait_until_it_says(self, text: str) -> None:
        def has_said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return text in self.log.read_text()

        wait_until(has_said, f"pagoda serve says {text!r}", deadline_s=START_DEADLINE_S)

    def processes(self, named: str = "") -> list[int]:
        """Ids of all processes of the session whose command line holds `named`."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                    command = (folder / "cmdline").read_text(errors="replace")
                except OSError:
                    continue  # it ended meanwhile
                if session == self.process.pid and named in command:
                    found.append(int(folder.name))
        return found

    def scratch_folder(self) -> Path:
        """Where the files of its proxy are; of all proxies, if one that was replaced still has a client."""
        proxy, *_ = self.processes("haproxy\0-db")
        *_, config = Path(f"/proc/{proxy}/cmdline").read_text().partition("\0-f\0")
        folder = Path(config.split("\0")[0])
        while not folder.name.startswith("pagoda-"):
            folder = folder.parent
        return folder

    def assert_it_ends_without_a_trace(self) -> None:
        """It exits by itself, with success; no process is left, and the port is free."""
        assert self.process.wait(START_DEADLINE_S) == 0, self.log.read_text()
        said = self.log.read_text()
        assert "Traceback" not in said, said
        assert "SIGTERM" not in said, said
        wait_until(lambda: not self.processes(), "no process of the service is left")
        assert_port_is_free(self.port)
        assert_port_is_free(self.grpc_port)


@contextmanager
def pagoda_serve(
    model: Path, folder: Path, *options: str, port: int | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """Run the command with its standard error in a file. Whatever is left at the end of the block is killed."""
    port, grpc_port = port or free_port(), free_port()
    log = folder / f"serve-{port}-{time.monotonic_ns()}.log"
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    command = [PAGODA, "serve", "--model", model, *ports, "--kv-cache-gib", "0.3", *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=errors, stderr=errors, start_new_session=True, env=os.environ | (environment or {})
        )
    service = Service(process, port, grpc_port, log)
    try:
        yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(DEADLINE_S)
        for left_over in service.processes():
            os.kill(left_over, signal.SIGKILL)


def free_port() -> int:
    """One that the system does not give to somebody else's client before the service listens there."""
    while True:
        with suppress(OSError), socket.socket() as probe:
            port = random.randrange(30_000, 32_000)
            probe.bind(("", port))
            return port


def assert_port_is_free(port: int) -> None:
    socket.create_server(("127.0.0.1", port)).close()


def write_endless_model(folder: Path, tiny: Path) -> Path:
    """Random weights for contexts of a million tokens."""
    return write_tiny_model(folder / MODEL, tokenizer_from=tiny, max_position=2 * ENDLESS)


def short(prompt: str = "a", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 3, **fields}


def endless_stream(prompt: str = "a", **fields: Any) -> dict[str, Any]:
    return short(prompt, max_tokens=ENDLESS, ignore_eos=True, stream=True, **fields)


def last_event_of(response: httpx.Response) -> dict[str, Any]:
    """The event before `[DONE]`."""
    *_, event, done = (line.removeprefix("data: ") for line in response.iter_lines() if line)
    assert done == "[DONE]"
    body: dict[str, Any] = json.loads(event)
    return body
