"""Workers of one process that can be killed, and a client that goes on without them. Ray's part is a few lines."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from pagoda.cluster.ingress.resuming_client import ResumingClient, WorkerFullError, WorkerStoppingError
from pagoda.cluster.ingress.sessions import WorkerEndpoint, WorkerLostError, WorkerSessions
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import EngineStoppedError, OverloadedError
from pagoda.worker.server import WorkerServer
from pagoda.worker.types import Request, RequestId, SamplingParams, SequenceOutput

TOKEN = "secret"
DEADLINE_S = 30.0
PROMPT = (5, 6, 7, 8, 9) * 4


class Worker:
    """An engine behind its server; it can be killed."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = AsyncEngine(config, progress=lambda *_: None)
        self.server = WorkerServer(self.engine, token=TOKEN)
        self.is_dying = False
        self.death = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> WorkerEndpoint:
        address = await self.server.start("127.0.0.1")
        return WorkerEndpoint(address, boot_id=address)

    async def kill(self) -> None:
        """Nobody is told: connections end, and calls fail as those to a process that is gone.

        Connections first: the engine, which lives on here, must not say what a dead one would not.
        """
        self.is_dying = True
        await self._stop()
        self.death.set()

    async def _stop(self) -> None:
        """Once, and to its end: whoever kills it may be cancelled by that very death."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self.server.stop())
        await asyncio.shield(self._stopping)

    async def close(self) -> None:
        await self._stop()
        await asyncio.to_thread(self.engine.shutdown)


class Calls:
    """Plays the part of Ray Serve: gives each request to the next worker in turn, and fails when that dies."""

    def __init__(self, workers: Sequence[Worker], *, ingress_id: str = "front") -> None:
        self.workers = list(workers)
        self.requests: list[Request] = []
        """Those that were given to a worker."""
        self._ingress_id = ingress_id

    async def ping(self) -> None: ...

    async def run(self, request: Request, ranked: tuple[str, ...]) -> None:  # noqa: ARG002  (chooses by itself)
        worker = self.workers[len(self.requests) % len(self.workers)]
        self.requests.append(request)
        running = asyncio.ensure_future(worker.server.run_request(request, self._ingress_id))
        dying = asyncio.ensure_future(worker.death.wait())
        try:
            await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():
                running.result()
        except OverloadedError as error:
            raise WorkerFullError(str(error)) from error
        except EngineStoppedError as error:
            if not worker.is_dying:
                raise WorkerStoppingError(str(error)) from error
        finally:
            running.cancel()
            dying.cancel()
        if worker.is_dying:
            raise WorkerLostError("it died")


class Cluster:
    """Some workers and a client of theirs."""

    def __init__(self, workers: list[Worker], sessions: WorkerSessions) -> None:
        self.workers = workers
        self.calls = Calls(workers)
        self.losses: list[bool] = []
        """Whether the request went on, each time that one lost its worker."""
        self.client = ResumingClient(self.calls, sessions, workers[0].engine.limits, on_lost=self.losses.append)

    async def until_idle(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            for worker in self.workers:
                while worker.engine.stats().num_running + worker.engine.stats().num_waiting:
                    await asyncio.sleep(0.002)
        for worker in self.workers:
            assert worker.engine.stats().num_held_blocks == 0
            assert not worker.engine.live_requests


@asynccontextmanager
async def cluster(config: EngineConfig, num_workers: int = 2, **options: Any) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        workers = [Worker(config) for _ in range(num_workers)]
        for worker in workers:
            stack.push_async_callback(worker.close)
        sessions = WorkerSessions("front", token=TOKEN, **options)
        stack.push_async_callback(sessions.shutdown)
        sessions.set_routable([await worker.start() for worker in workers])
        yield Cluster(workers, sessions)


def request(sampling: SamplingParams, name: str = "r") -> Request:
    return Request(RequestId(name), PROMPT, sampling)


def take(outputs: dict[int, SequenceOutput], batch: list[SequenceOutput]) -> None:
    for output in batch:
        before = outputs.get(output.index)
        outputs[output.index] = output if before is None else before.merged_with(output)


async def collect(it: Cluster, asked: Request, *, kills_at: Sequence[int] = ()) -> dict[int, SequenceOutput]:
    """Each sample's outputs as one. As many workers are killed, in turn, each once so many tokens have come."""
    outputs: dict[int, SequenceOutput] = {}
    left = list(kills_at)
    async with asyncio.timeout(DEADLINE_S), aclosing(it.client.stream(asked)) as batches:
        async for batch in batches:
            take(outputs, batch)
            if left and sum(len(output.token_ids) for output in outputs.values()) >= left[0]:
                del left[0]
                await it.calls.workers[(len(it.calls.requests) - 1) % len(it.calls.workers)].kill()
    return outputs


def shown(outputs: dict[int, SequenceOutput]) -> list[tuple[object, ...]]:
    return [
        (o.token_ids, o.finish_reason, o.stop_reason, o.num_cached_tokens, o.logprobs, o.prompt_logprobs)
        for _, o in sorted(outputs.items())
    ]
