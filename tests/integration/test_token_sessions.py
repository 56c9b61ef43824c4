"""Tokens between workers and ingress processes over real gRPC on loopback; Serve's part is played by plain tasks."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from ray.exceptions import RayTaskError
from tiny_model import write_tiny_model

from pagoda.cluster.ingress.resuming_client import ResumingClient
from pagoda.cluster.ingress.sessions import WorkerEndpoint, WorkerSessions
from pagoda.cluster.worker_client import ServeWorkerCalls
from pagoda.proto import tokens_pb2, tokens_pb2_grpc
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import CacheConfig, EngineConfig, EngineLimits, SchedulerConfig
from pagoda.worker.errors import OverloadedError
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.server import SessionLostError, WorkerServer
from pagoda.worker.types import FinishReason, Request, RequestId, SamplingParams, SequenceOutput

TOKEN = "secret"
DEADLINE_S = 20.0
LIMITS = EngineLimits(max_model_len=512, vocab_size=512, max_num_seqs=8, max_num_waiting=4)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


class Call:
    """What a streaming Serve handle's `remote` returns, over a coroutine in this process."""

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    async def __anext__(self) -> Any:
        return await self._task

    def cancel(self) -> None:
        self._task.cancel()


class Handle:
    """A Serve handle that calls the workers in turn and raises as Serve does."""

    def __init__(self, *workers: WorkerServer | Exception) -> None:
        self._workers = list(workers)
        self.num_calls = 0
        self.rankings: list[tuple[str, ...]] = []

    def options(self, *, stream: bool, _by_reference: bool) -> "Handle":
        assert stream
        assert not _by_reference
        return self

    @property
    def run_request(self) -> "Handle":
        return self

    def remote(self, request: Request, ingress_id: str, ranked: tuple[str, ...]) -> Call:
        self.rankings.append(ranked)
        worker = self._workers[self.num_calls % len(self._workers)]
        self.num_calls += 1
        return Call(self._run(worker, request, ingress_id))

    async def _run(self, worker: WorkerServer | Exception, request: Request, ingress_id: str) -> None:
        if isinstance(worker, Exception):
            raise worker
        try:
            await worker.run_request(request, ingress_id)
        except Exception as error:
            raise RayTaskError("run_request", "remote stack", error) from error


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return EngineConfig(
        folder,
        fake_step_s=0.002,
        cache=CacheConfig(num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_num_waiting=4),
    )


@pytest.fixture
def engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(config, progress=lambda *_: None)
    yield engine
    engine.shutdown()


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[tuple[WorkerServer, WorkerEndpoint]]:
    server = WorkerServer(engine, token=TOKEN)
    address = await server.start("127.0.0.1")
    try:
        yield server, WorkerEndpoint(address, boot_id=address)
    finally:
        await server.stop()


@asynccontextmanager
async def ingress(*endpoints: WorkerEndpoint, name: str = "front", token: str = TOKEN) -> AsyncIterator[WorkerSessions]:
    sessions = WorkerSessions(name, token=token)
    sessions.set_routable(endpoints)
    try:
        yield sessions
    finally:
        await sessions.shutdown()


def client_of(handle: Any, sessions: WorkerSessions, ingress_id: str) -> ResumingClient:
    return ResumingClient(ServeWorkerCalls(handle, ingress_id), sessions, LIMITS)


def request(name: str, sampling: SamplingParams = ENDLESS) -> Request:
    return Request(RequestId(name), (5, 6, 7), sampling)


async def collect(outputs: AsyncGenerator[list[SequenceOutput], None]) -> dict[int, SequenceOutput]:
    """Each sample's outputs as one."""
    merged: dict[int, SequenceOutput] = {}
    async with asyncio.timeout(DEADLINE_S), aclosing(outputs):
        async for batch in outputs:
            for output in batch:
                before = merged.get(output.index)
                merged[output.index] = output if before is None else before.merged_with(output)
    return merged


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while engine.stats().num_running + engine.stats().num_waiting:
            await asyncio.sleep(0.002)


async def test_tokens_are_those_of_the_engine(engine: AsyncEngine) -> None:
    """Every token comes once and in order, for all samples, and equals what the engine says in this process."""
    local = PendingOutputs()
    sampling = replace(ENDLESS, n=3, max_tokens=60)
    expected: dict[int, SequenceOutput] = {}
    await engine.run(request("local", sampling), local.put)
    for output in await local.take():
        expected[output.index] = output
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        found = await collect(client.stream(request("remote", sampling)))
    assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in expected.items()}
    assert {o.finish_reason for o in found.values()} == {FinishReason.LENGTH}


async def test_two_ingresses_and_two_workers(engine: AsyncEngine, config: EngineConfig) -> None:
    """Each ingress gets its own requests' tokens, whichever worker runs them."""
    other_engine = AsyncEngine(config, progress=lambda *_: None)
    try:
        async with started(engine) as (one, at_one), started(other_engine) as (two, at_two):
            async with ingress(at_one, at_two, name="a") as a, ingress(at_one, at_two, name="b") as b:
                handle = Handle(one, two)
                clients = [client_of(handle, a, "a"), client_of(handle, b, "b")]
                sampling = replace(ENDLESS, max_tokens=20)
                streams = [clients[i % 2].stream(request(f"r{i}", sampling)) for i in range(8)]
                found = await asyncio.gather(*map(collect, streams))
    finally:
        other_engine.shutdown()
    assert [len(outputs[0].token_ids) for outputs in found] == [20] * 8
    assert {outputs[0].request_id for outputs in found} == {f"r{i}~0" for i in range(8)}


async def test_reader_that_stays_away_delays_nobody(engine: AsyncEngine) -> None:
    """One stream is read once and then left alone while another one runs to its end; then it is read to its own."""
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        slow = client.stream(request("slow"))
        first = await anext(slow)
        await collect(client.stream(request("quick", replace(ENDLESS, max_tokens=390))))
        rest = await collect(slow)
    num_batches_at_once = len(rest[0].token_ids)
    assert len(first[0].token_ids) + num_batches_at_once == 400


async def test_closed_stream_aborts_its_request(engine: AsyncEngine) -> None:
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        stream = client.stream(request("a"))
        await anext(stream)
        await stream.aclose()
        await until_idle(engine)


@pytest.mark.parametrize(("max_tokens", "num_aborts"), [(1, 0), (400, 1)], ids=["ended", "unended"])
async def test_workers_are_told_of_unended_requests_only(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, max_tokens: int, num_aborts: int
) -> None:
    """A reader closes the stream at its last batch too; a message to every worker for each answer would be waste."""
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        told: list[RequestId] = []
        monkeypatch.setattr(sessions, "abort_everywhere", told.append)
        client = client_of(Handle(server), sessions, "front")
        stream = client.stream(request("a", replace(ENDLESS, max_tokens=max_tokens)))
        await anext(stream)
        await stream.aclose()
        assert len(told) == num_aborts
        await until_idle(engine)


async def test_request_that_nobody_waits_for_is_ended(engine: AsyncEngine) -> None:
    """Scenario: a client goes while its call is on the way, and the worker never hears that the call was cancelled."""
    async with started(engine) as (server, endpoint), ingress(endpoint):
        async with asyncio.timeout(DEADLINE_S):
            await server.run_request(request("left behind"), "front")
        assert 'pagoda_request_success_total{finished_reason="abort",worker="local"} 1.0' in engine.metrics_exposition()


async def test_one_sample_is_whole(engine: AsyncEngine) -> None:
    """It ends as stopped; the other sample runs on to its end."""
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        stream = client.stream(request("a", replace(ENDLESS, n=2)))
        await anext(stream)
        client.complete_sample(RequestId("a"), 1)
        client.complete_sample(RequestId("unknown"), 0)
        found = await collect(stream)
    assert found[1].finish_reason is FinishReason.STOP
    assert found[0].finish_reason is FinishReason.LENGTH


async def test_request_aborted_through_another_ingress(engine: AsyncEngine) -> None:
    """All of its samples end, and as aborted."""
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions, ingress(endpoint, name="b") as b:
        client = client_of(Handle(server), sessions, "front")
        stream = client.stream(request("a", replace(ENDLESS, n=2)))
        await anext(stream)
        async with asyncio.timeout(DEADLINE_S):
            while not b._live_sessions:
                await asyncio.sleep(0.002)
        b.abort_everywhere(RequestId("a"))
        found = await collect(stream)
    assert [found[index].finish_reason for index in (0, 1)] == [FinishReason.ABORT] * 2


async def test_lost_ingress_takes_its_requests_with_it(engine: AsyncEngine) -> None:
    """Its session ends without a word; the worker ends its request and goes on serving the other ingress."""
    async with started(engine) as (server, endpoint), ingress(endpoint, name="b") as b:
        async with ingress(endpoint, name="a") as a:
            a.open(RequestId("lost"))
            call = asyncio.create_task(server.run_request(request("lost"), "a"))
            async with asyncio.timeout(DEADLINE_S):
                while not engine.stats().num_running:
                    await asyncio.sleep(0.002)
        with pytest.raises(SessionLostError):
            await asyncio.wait_for(call, DEADLINE_S)
        await until_idle(engine)
        client = client_of(Handle(server), b, "b")
        assert await collect(client.stream(request("next", replace(ENDLESS, max_tokens=3))))


async def test_session_that_its_worker_ends_leaves_nothing(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an iterator of commands, gRPC went on waiting for its next one, and was found doing so by the garbage
    collector: "aclose(): asynchronous generator is already running"."""
    monkeypatch.setattr("pagoda.worker.server._STOP_GRACE_S", 0)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    tasks = asyncio.all_tasks()
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        await collect(client.stream(request("a", replace(ENDLESS, max_tokens=1))))
        sessions.set_routable([])
        await server.stop()
        async with asyncio.timeout(DEADLINE_S):
            while sessions._tasks:
                await asyncio.sleep(0.002)
    gc.collect()
    async with asyncio.timeout(DEADLINE_S):
        while asyncio.all_tasks() != tasks:
            await asyncio.sleep(0.002)
    assert not complaints


async def test_refusal_comes_through_as_it_is(engine: AsyncEngine) -> None:
    """8 samples run and 4 wait: the client of the next reads OverloadedError, not a remote stack trace."""
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        streams = [client.stream(request(f"busy{i}", replace(ENDLESS, n=4))) for i in range(3)]
        firsts = [asyncio.create_task(anext(stream)) for stream in streams]
        async with asyncio.timeout(DEADLINE_S):
            while not engine.stats().num_waiting:
                await asyncio.sleep(0.002)
        with pytest.raises(OverloadedError):
            await anext(client.stream(request("refused")))
        for first in firsts:
            first.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)
        await until_idle(engine)


async def test_request_without_a_session_is_refused(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.worker.server.SESSION_DEADLINE_S", 0.05)
    async with started(engine) as (server, _):
        with pytest.raises(SessionLostError, match="no session"):
            await server.run_request(request("a"), "nobody")
    assert engine.stats().num_running == 0


@pytest.mark.parametrize(
    ("token", "hello", "code"),
    [
        ("wrong", tokens_pb2.SessionHello(ingress_id="x"), grpc.StatusCode.UNAUTHENTICATED),
        ("", tokens_pb2.SessionHello(ingress_id="x"), grpc.StatusCode.UNAUTHENTICATED),
        (TOKEN, tokens_pb2.SessionHello(), grpc.StatusCode.INVALID_ARGUMENT),
        (TOKEN, None, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["wrong token", "no token", "no id", "no hello"],
)
async def test_session_is_refused(
    engine: AsyncEngine, token: str, hello: tokens_pb2.SessionHello | None, code: grpc.StatusCode
) -> None:
    """Whoever cannot show the token, or says no proper hello, gets no session; the one that is there stays."""
    async with started(engine) as (server, endpoint), ingress(endpoint) as sessions:
        client = client_of(Handle(server), sessions, "front")
        await collect(client.stream(request("before", replace(ENDLESS, max_tokens=2))))
        async with grpc.aio.insecure_channel(endpoint.address) as channel:
            command = tokens_pb2.SessionCommand(hello=hello) if hello else tokens_pb2.SessionCommand()
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            call = tokens_pb2_grpc.TokenStreamStub(channel).Session(iter([command]), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await asyncio.wait_for(call.read(), DEADLINE_S)
        assert refusal.value.code() is code
        await collect(client.stream(request("after", replace(ENDLESS, max_tokens=2))))


async def test_a_later_session_of_an_ingress_takes_the_place_of_the_one_before(engine: AsyncEngine) -> None:
    """Scenario: an ingress has given a session up, and the worker, behind a bad network, has not heard of that.

    What ran over it is told to its caller at once, and the ingress need not wait until the worker notices.
    """
    async with started(engine) as (server, endpoint), grpc.aio.insecure_channel(endpoint.address) as channel:
        stub, metadata = tokens_pb2_grpc.TokenStreamStub(channel), (("authorization", f"Bearer {TOKEN}"),)
        hello = tokens_pb2.SessionCommand(hello=tokens_pb2.SessionHello(ingress_id="front"))

        async def open_session() -> Any:
            call = stub.Session(metadata=metadata)
            await call.write(hello)
            await call.initial_metadata()
            return call

        await open_session()
        running = asyncio.create_task(server.run_request(request("r"), "front"))
        while not engine.stats().num_running:
            await asyncio.sleep(0.002)
        later = await open_session()
        with pytest.raises(SessionLostError):
            await asyncio.wait_for(running, DEADLINE_S)
        await until_idle(engine)
        running = asyncio.create_task(server.run_request(request("s", replace(ENDLESS, max_tokens=2)), "front"))
        assert "s" in str(await asyncio.wait_for(later.read(), DEADLINE_S))
        await running


def test_endpoint_survives_the_way_through_serve() -> None:
    endpoint = WorkerEndpoint("127.0.0.1:1", "boot")
    assert WorkerEndpoint.from_metadata(endpoint.as_metadata()) == endpoint
    assert WorkerEndpoint.from_metadata({}) is None


async def test_bytes_that_are_no_command(engine: AsyncEngine) -> None:
    """gRPC itself would answer UNKNOWN, and not say what is wrong. Behind a hello they end the session."""
    hello = tokens_pb2.SessionCommand(hello=tokens_pb2.SessionHello(ingress_id="odd")).SerializeToString()
    async with started(engine) as (_, endpoint), grpc.aio.insecure_channel(endpoint.address) as channel:
        method = channel.stream_stream("/pagoda.v1.TokenStream/Session")
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        for commands, code in (
            ([b"\xff\xff"], grpc.StatusCode.INVALID_ARGUMENT),
            ([hello, b"\xff\xff"], grpc.StatusCode.OK),
        ):
            call = method(iter(commands), metadata=metadata)
            assert await asyncio.wait_for(call.code(), DEADLINE_S) is code
