"""A `pagoda serve` of a benchmark's own: started, watched, asked, stopped."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

START_LIMIT_S = 180.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Stream:
    """When a stream's pieces came, seconds on `time.perf_counter`."""

    sent_s: float
    piece_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.piece_s, self.piece_s[1:], strict=False)]


class Service:
    """A running service."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str, mark: str) -> None:
        self.process, self.port, self.model = process, port, model
        self._mark = f"PAGODA_BENCH={mark}".encode()

    def cpu_s(self) -> float:
        """CPU seconds so far of every process of the service."""
        total = 0
        for folder in self._processes():
            with suppress(OSError):  # it ended meanwhile
                total += sum(map(int, (folder / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        return total / _TICKS_PER_S

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every process of the service stands still; for seconds only, or its parts take each other for dead."""
        processes = [int(folder.name) for folder in self._processes()]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)

    def _processes(self) -> list[Path]:
        """Their folders in /proc, found by a mark in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or is not ours to read
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(folder)
        return found

    async def stream(self, prompt: str | list[int], max_tokens: int) -> Stream:
        """One streamed completion over a plain socket: as little of the client as can be."""
        body = json.dumps(
            {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        events = _Events(loop.create_future())
        transport, _ = await loop.create_connection(lambda: events, "127.0.0.1", self.port)
        events.stream.sent_s = time.perf_counter()
        transport.write(head.encode() + body)
        return await events.ended


class _Events(asyncio.Protocol):
    """Notes when each event of a stream comes. Here nothing may take long: it takes it from the service."""

    def __init__(self, ended: "asyncio.Future[Stream]") -> None:
        self.stream = Stream(0.0)
        self.ended = ended
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        now = time.perf_counter()
        for event in events:
            if event.endswith(b"data: [DONE]"):
                assert self._transport is not None
                self._transport.close()
                self.ended.set_result(self.stream)
            elif b'data: {"error"' in event:
                self.ended.set_exception(SystemExit(f"the service answers {event!r}"))
            else:
                self.stream.piece_s.append(now)

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(f"the service hung up after {self._rest!r}"))


@contextmanager
def serve(model: str, *options: str) -> Iterator[Service]:
    """Start the service as a user would; stop it as a user would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark = uuid.uuid4().hex
    pagoda = Path(sys.executable).with_name("pagoda")
    command = [str(pagoda), "serve", "--model", model, "--port", str(port), "--grpc-port", "0", *options]
    process = subprocess.Popen(command, env={**os.environ, "PAGODA_BENCH": mark})
    service = Service(process, port, model, mark)
    try:
        _wait_until_it_answers(service)
        yield service
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait_until_it_answers(service: Service) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    body = json.dumps({"model": service.model, "prompt": "Once", "max_tokens": 1}).encode()
    while time.monotonic() < deadline and service.process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{service.port}/v1/completions", body, timeout=60).read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the service did not come up")
