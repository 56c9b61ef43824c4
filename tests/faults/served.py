"""A `pagoda serve` that faults are injected into: which of its processes does what, and what it holds when idle."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import Usage, command_of, kill, start_time_of, usage_of

PAGODA = Path(sys.executable).with_name("pagoda")
START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0
_POLL_S = 0.2
_ROLES = {
    "worker": "ray::ServeReplica:workers:Worker",
    "ingress": "ray::ServeReplica:front:Front",
    "directory": "ray::DirectoryActor",
    "proxy": "haproxy -db",
}
"""What the command lines of processes hold, by what they are for us."""
_GAUGE = re.compile(r"^(pagoda_num_requests_(?:running|waiting)){[^}]*} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Held:
    """What a service holds."""

    num_workers: int
    """That the directory knows."""
    num_blocks: int
    num_sequences: int
    num_reservations: int

    @property
    def is_nothing(self) -> bool:
        return not (self.num_blocks or self.num_sequences or self.num_reservations)


class ServedCluster:
    """A running service and its processes, which are those of its session."""

    def __init__(self, process: "subprocess.Popen[bytes]", model: str, port: int, grpc_port: int) -> None:
        self.process = process
        self.model = model
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.AsyncClient(base_url=self.url, timeout=10.0)

    def processes(self, role: str | None = None) -> list[int]:
        """Ids of all that live, or of those with a role; the oldest first."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):  # it ended meanwhile
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(folder.name))
        if role is not None:
            found = [process for process in found if _ROLES[role] in command_of(process)]
        return sorted(found, key=start_time_of)

    def usage(self) -> dict[str, Usage]:
        """What all processes of each role take together; `all` is the whole service."""
        by_role = {role: Usage() for role in (*_ROLES, "all")}
        for process in self.processes():
            usage, command = usage_of(process), command_of(process)
            by_role["all"] += usage
            for role, text in _ROLES.items():
                if text in command:
                    by_role[role] += usage
        return by_role

    async def answers(self) -> bool:
        """Whether a request is served now."""
        body = {"model": self.model, "prompt": "Once", "max_tokens": 1}
        try:
            return (await self._http.post("/v1/completions", json=body)).status_code == 200
        except httpx.HTTPError:
            return False

    async def worker_ids(self) -> set[str]:
        """Boot ids of the workers that the directory knows; empty if it does not say."""
        try:
            return {worker["worker_id"] for worker in (await self._stats())["workers"]}
        except (httpx.HTTPError, KeyError, ValueError):
            return set()

    async def held(self) -> Held | None:
        """None if the service does not say."""
        try:
            stats, metrics = await self._stats(), (await self._http.get("/metrics")).text
            return Held(
                num_workers=len(stats["workers"]),
                num_blocks=sum(int(w["num_blocks"]) - int(w["num_free_blocks"]) for w in stats["workers"]),
                num_sequences=sum(int(float(value)) for _, value in _GAUGE.findall(metrics)),
                num_reservations=int(stats["reservations"]),
            )
        except (httpx.HTTPError, KeyError, ValueError):
            return None

    async def held_after_rest(self, num_workers: int, *, deadline_s: float) -> Held:
        """As soon as so many workers are there and nothing is held; or what still is after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        held: Held | None = None
        while time.monotonic() < end_s:
            last = await self.held()
            held = last or held
            if last is not None and last.is_nothing and last.num_workers == num_workers:
                break
            await asyncio.sleep(_POLL_S)
        return held or Held(0, 0, 0, 0)

    async def until_complete(self, num_workers: int, *, without: Sequence[str] = ()) -> None:
        """Return once the directory knows so many workers, none of which is one of `without`."""
        async with asyncio.timeout(START_LIMIT_S):
            while len(ids := await self.worker_ids()) != num_workers or ids & set(without):
                await asyncio.sleep(_POLL_S)

    async def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self._http.get("/directory/stats")).json()
        return stats

    async def close(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def served(
    model: str, *options: str, num_workers: int, log: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[ServedCluster]:
    """Start a service as a user would, wait until all is there, and stop it as a user would."""
    port, grpc_port = _free_ports()
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    command = [str(PAGODA), "serve", "--model", model, "--workers", str(num_workers)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, *ports, *options],
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env=os.environ | (environment or {}),
        )
    cluster = ServedCluster(process, Path(model).name, port, grpc_port)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not await cluster.answers():
                if process.poll() is not None:
                    raise RuntimeError(f"the service did not come up: {log.read_text()}")
                await asyncio.sleep(_POLL_S)
        await cluster.until_complete(num_workers)
        yield cluster
    finally:
        await cluster.close()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.to_thread(process.wait, STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for left_over in cluster.processes():
            kill(left_over)
        process.wait()


def _free_ports() -> tuple[int, int]:
    """Two that the system does not give to somebody else's client before the service listens there."""
    found: list[int] = []
    while len(found) < 2:
        with suppress(OSError), socket.socket() as probe:
            port = random.randrange(30_000, 32_000)
            probe.bind(("", port))
            found.append(port)
    return found[0], found[1]
