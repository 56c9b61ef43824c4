"""A worker as a process of a cluster without Ray.

It is the very class that Ray Serve deploys (`cluster/replica.py`), with a fake model. A socket stands for Serve's calls
and breaks when either end dies. Messages are pickles behind their length, between processes of one test.
"""

import asyncio
import os
import pickle
import socket
import struct
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagoda.cluster.replica import Worker
from pagoda.worker.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda.worker.errors import PagodaError
from pagoda.worker.local_ranks import LocalRanks
from pagoda.worker.types import Request

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is to be."""

    model: Path
    """A folder, of which config and tokenizer count."""
    model_name: str
    token: str
    host: str
    """Where it listens, as ingresses see it."""
    directories: tuple[str, ...]
    """host:port each."""
    step_s: float
    token_s: float
    num_blocks: int
    max_num_seqs: int
    max_num_waiting: int

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            self.model,
            device="cpu",
            num_threads=1,
            fake_step_s=self.step_s,
            fake_token_s=self.token_s,
            cache=CacheConfig(num_blocks=self.num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=self.max_num_seqs, max_num_waiting=self.max_num_waiting),
        )


@dataclass(frozen=True, slots=True)
class WorkerProbe:
    """What a worker still holds: nothing, once nobody wants anything of it."""

    num_sequences: int
    num_held_blocks: int
    num_live_requests: int
    """In the engine, before it and in its server."""
    num_tasks: int
    num_files: int
    problem: str
    """What its bookkeeping says against itself."""


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Raises `asyncio.IncompleteReadError` or `ConnectionError` once the other end is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(data)) + data)


class _Served:
    """One worker and its end of the socket."""

    def __init__(self, spec: WorkerSpec, writer: asyncio.StreamWriter) -> None:
        async def resolve(address: str) -> str:
            return address

        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._worker = Worker(
            spec.engine_config(),
            spec.model_name,
            spec.token,
            lambda: spec.host,
            [lambda address=address: resolve(address) for address in spec.directories],  # type: ignore[misc]
            "error",
            LocalRanks,
        )
        self._num_tasks_at_rest = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the cluster is gone."""
        write_message(self._writer, (0, await self._worker.record_replica_metadata()))
        while True:
            number, kind, argument = await read_message(reader)
            if kind == "cancel":
                if (call := self._calls.get(number)) is not None:
                    call.cancel()
                continue
            self._calls[number] = call = asyncio.create_task(self._answer(number, kind, argument))
            call.add_done_callback(lambda _, number=number: self._calls.pop(number, None))

    async def _answer(self, number: int, kind: str, argument: Any) -> None:
        match kind:
            case "run":
                write_message(self._writer, (number, await self._run(*argument)))
            case "probe":
                write_message(self._writer, (number, self._probe()))
            case "jump":
                _jump_clock(argument)
                write_message(self._writer, (number, None))

    async def _run(self, request: Request, ingress_id: str) -> PagodaError | None:
        try:
            async with aclosing(self._worker.run_request(request, ingress_id)) as ends:  # type: ignore[type-var]
                return await anext(ends)
        except PagodaError as error:
            return error

    def _probe(self) -> WorkerProbe:
        worker: Any = self._worker  # a look inside, which nobody else takes
        engine = worker._engine._engine
        scheduler = engine._scheduler
        problem = ""
        stats = engine.stats()
        if not stats.num_running + stats.num_waiting:
            try:
                scheduler.check_integrity()
            except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
                problem = f"{type(error).__name__}: {error}"
        if engine.failure is not None:
            problem = f"the engine died: {engine.failure}"
        pool = scheduler.manager.pool
        sessions = [future.result() for future in worker._server._sessions.values() if future.done()]
        num_in_sessions = sum(len(getattr(session, "requests", ())) for session in sessions)
        return WorkerProbe(
            num_sequences=stats.num_running + stats.num_waiting,
            num_held_blocks=pool.num_blocks - pool.num_free,
            num_live_requests=len(engine._live) + len(worker._engine._live) + num_in_sessions + len(self._calls) - 1,
            num_tasks=len(asyncio.all_tasks()),
            num_files=len(os.listdir("/proc/self/fd")),
            problem=problem,
        )


def _jump_clock(by_s: float) -> None:
    """The wall clock of this process is another one from now on. Intervals must not notice."""
    real_s, real_ns = time.time, time.time_ns
    time.time = lambda: real_s() + by_s
    time.time_ns = lambda: real_ns() + int(by_s * 1e9)


def be_worker(connection: socket.socket, spec: WorkerSpec) -> None:
    """Live until the cluster at the other end of the socket is gone."""
    torch.set_num_threads(1)

    async def live() -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        served = _Served(spec, writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the cluster is gone, and we with it
            await served.serve(reader)

    asyncio.run(live())
