"""Directory, publishers and clients over gRPC on the loopback, through everything that may go wrong between them."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.cluster.directory.client import DirectoryClient, PlacementQuery
from pagoda.cluster.directory.index import Tier
from pagoda.cluster.directory.publisher import DirectoryPublisher, Journal
from pagoda.cluster.directory.server import SERVICE, DirectoryServer
from pagoda.proto import directory_pb2 as pb
from pagoda.proto.directory_pb2_grpc import DirectoryStub
from pagoda.worker.block_hash import BlockHash
from pagoda.worker.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

DEADLINE_S = 20.0
BLOCK_SIZE = 16


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def blocks(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(map(block, numbers))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def directory(
    port: int = 0, kind: type[DirectoryServer] = DirectoryServer, **options: Any
) -> AsyncIterator[tuple[DirectoryServer, str]]:
    server = kind(seed=0, **options)
    address = f"127.0.0.1:{await server.start(f'127.0.0.1:{port}')}"
    try:
        yield server, address
    finally:
        await server.stop()


def at(*addresses: str) -> list[Callable[[], Awaitable[str]]]:
    async def resolve(address: str) -> str:
        return address

    return [lambda address=address: resolve(address) for address in addresses]  # type: ignore[misc]


class Worker:
    """A publisher, and the worker's own truth."""

    def __init__(self, name: str, *addresses: str, token: str | None = None, journal: Journal | None = None) -> None:
        hello = pb.Hello(
            worker_id=name, epoch=1, model="m", block_size=BLOCK_SIZE, windows=[0], num_blocks=1000, max_num_seqs=8
        )
        self.name = name
        self.held: set[BlockHash] = set()
        self.publisher = DirectoryPublisher(hello, at(*addresses), token=token, journal=journal)
        self.publisher.start()

    def publish(self, *events: KVEvent, **ids: Any) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self.held.update(event.hashes)
            else:
                self.held.difference_update(event.hashes)
        report = pb.LoadReport(num_free_blocks=1000, num_empty_blocks=1000, rates=pb.Rates(prefill_s_per_token=1e-3))
        self.publisher.publish(events, report, **ids)

    def is_known_to(self, server: DirectoryServer) -> bool:
        """Whether the directory knows exactly what this worker holds, and says so."""
        record = server.state.workers.by_id.get(self.name)
        if record is None or not record.is_exact:
            return False
        index = server.state.workers.models["m"].index
        return {key for _, key in index.keys_of(record.slot, Tier.DEVICE)} == self.held


@asynccontextmanager
async def worker(name: str, *addresses: str, **options: Any) -> AsyncIterator[Worker]:
    one = Worker(name, *addresses, **options)
    try:
        yield one
    finally:
        await one.publisher.stop()


def query(request_id: str, *numbers: int) -> PlacementQuery:
    return PlacementQuery(request_id, "m", blocks(*numbers), len(numbers) * BLOCK_SIZE + 1)


@asynccontextmanager
async def client(*addresses: str, **options: Any) -> AsyncIterator[DirectoryClient]:
    one = DirectoryClient(at(*addresses), **options)
    one.start()
    try:
        yield one
    finally:
        await one.close()


async def placed(one: DirectoryClient, request_id: str, *numbers: int) -> pb.PlaceResponse:
    """An answer, as soon as there is one."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await one.place(query(request_id, *numbers))) is None:
            await asyncio.sleep(0.02)
    return answer


async def test_what_workers_hold_is_where_requests_go() -> None:
    async with directory() as (server, address), worker("a", address) as a, worker("b", address) as b:
        a.publish(BlockStored(0, blocks(1, 2, 3)), BlockRemoved(0, blocks(3)))
        b.publish(BlockStored(0, blocks(7)))
        await until(lambda: a.is_known_to(server) and b.is_known_to(server))
        async with client(address) as one:
            assert (await placed(one, "r", 1, 2, 3)).ranked == ["a", "b"]
            assert (await placed(one, "s", 7)).ranked == ["b", "a"]
        await a.publisher.stop()
        await until(lambda: "a" not in server.state.workers.by_id)


async def test_reservations_end_with_what_workers_say() -> None:
    async with directory() as (server, address), worker("a", address) as a, client(address) as one:
        await placed(one, "r", 1)
        await placed(one, "s", 1)
        assert len(server.state._reservations) == 2
        a.publish(admitted=["r"])
        one.gone("s")
        await until(lambda: not len(server.state._reservations))
        assert server.state._reservations.ends == {"admitted": 1, "released": 1}
        a.publish(finished=["r"])
        await until(lambda: not server.state.workers.live_at)


class Faulty(DirectoryServer):
    """Loses, repeats and swaps what workers send."""

    draw = random.Random(5)
    is_faulty = True

    async def _read_updates(self, updates: AsyncIterator[Any], acks: Any) -> None:
        await super()._read_updates(self._spoiled(updates), acks)

    async def _spoiled(self, updates: AsyncIterator[Any]) -> AsyncIterator[Any]:
        held_back: list[Any] = []
        async for update in updates:
            kind = self.draw.choice(("lose", "repeat", "swap", "pass", "pass")) if self.is_faulty else "pass"
            if not update.HasField("events"):
                kind = "pass"
            if kind == "swap":
                held_back.append(update)
                continue
            for each in {"lose": [], "repeat": [update, update], "pass": [update]}[kind]:
                yield each
            for each in held_back:
                yield each
            held_back.clear()


async def churn(one: Worker, draw: random.Random, num_steps: int) -> None:
    for _ in range(num_steps):
        new = blocks(*(draw.randrange(200) for _ in range(draw.randrange(1, 8))))
        old = tuple(sorted(draw.sample(sorted(one.held), min(len(one.held), draw.randrange(6)))))
        cleared = [AllBlocksCleared()] if draw.random() < 0.02 else []
        one.publish(*cleared, BlockStored(0, new), *([BlockRemoved(0, old)] if old and not cleared else []))
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_batches", [3, 4096], ids=["short journal", "long journal"])
async def test_events_lost_repeated_and_swapped(max_batches: int) -> None:
    """Whatever happens on the way, the index comes to what the workers hold, from the journal or by a snapshot."""
    async with (
        directory(kind=Faulty) as (server, address),
        worker("a", address, journal=Journal(max_batches=max_batches)) as a,
        worker("b", address, journal=Journal(max_batches=max_batches)) as b,
    ):
        await until(lambda: len(server.state.workers.by_id) == 2)
        seen = server.state.workers.events
        mended_by = "snapshot" if max_batches == 3 else "journal"
        for seed in range(400):
            await asyncio.gather(churn(a, random.Random(seed), 20), churn(b, random.Random(-seed), 20))
            await asyncio.sleep(0.02)
            if seed >= 20 and min(seen["gap"], seen["duplicate"]) > 3 and seen[mended_by]:
                break
        await until(lambda: a.is_known_to(server) and b.is_known_to(server))
        assert min(seen["gap"], seen["duplicate"]) > 3
        assert seen[mended_by] > 0


async def test_directory_restarts() -> None:
    """Nobody's request fails meanwhile, and what it knew is back within seconds."""
    async with directory() as (first, address):
        port = int(address.rpartition(":")[2])
        async with worker("a", address) as a, client(address) as one:
            a.publish(BlockStored(0, blocks(*range(1000))))
            a.publish(BlockRemoved(0, blocks(5)), admitted=["r"])
            await until(lambda: a.is_known_to(first))
            await placed(one, "x", 1)
            await first.stop()
            assert await one.place(query("y", 1)) is None
            a.publish(BlockStored(0, blocks(2000)))
            async with directory(port) as (second, _):
                begin = asyncio.get_running_loop().time()
                await until(lambda: a.is_known_to(second))
                answer = await placed(one, "z", 0, 1, 2)
                assert asyncio.get_running_loop().time() - begin < 5.0
                assert answer.plan.cached_tokens == 3 * BLOCK_SIZE
                assert second.state.workers.live_at == {"r": "a"}


@asynccontextmanager
async def wire(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A way to `address` that can be cut: while the event is not set nothing gets through, and nobody is told."""
    carries = asyncio.Event()
    carries.set()
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                await carries.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        writers.extend((writer, back))
        await asyncio.gather(carry(reader, back), carry(there, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", carries
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_partition() -> None:
    """The network between a directory and all others is cut, beyond the lease, and comes back: no request waits for it,
    and afterwards it knows what its workers hold, also of what happened meanwhile."""
    async with directory(lease_s=1.0) as (server, address), wire(address) as (through, carries):
        async with worker("a", through) as a, worker("b", through) as b, client(through) as one:
            a.publish(BlockStored(0, blocks(1, 2, 3)))
            await until(lambda: a.is_known_to(server) and b.is_known_to(server))
            assert (await placed(one, "r", 1, 2, 3)).ranked[0] == "a"
            carries.clear()
            loop = asyncio.get_running_loop()
            begin = loop.time()
            for number in range(20):
                assert await one.place(query(f"cut {number}", 1, 2, 3)) is None
            assert loop.time() - begin < 2.0
            a.publish(BlockStored(0, blocks(4)), BlockRemoved(0, blocks(3)))
            b.publish(BlockStored(0, blocks(9)))
            await until(lambda: not server.state.workers.by_id)
            carries.set()
            begin = loop.time()
            await until(lambda: a.is_known_to(server) and b.is_known_to(server))
            assert (await placed(one, "s", 9)).ranked[0] == "b"
            assert (await placed(one, "t", 1, 2)).ranked[0] == "a"
            assert loop.time() - begin < 5.0


async def test_worker_restarts_in_place() -> None:
    """The same name and a new epoch: nothing of before counts, and its old stream is heard no more."""
    async with directory() as (server, address), worker("a", address) as old:
        old.publish(BlockStored(0, blocks(1, 2)))
        await until(lambda: old.is_known_to(server))
        new = Worker("a", address)
        new.publisher._hello.epoch = 2
        new.publish(BlockStored(0, blocks(9)))
        await until(lambda: new.is_known_to(server))
        old.publish(BlockStored(0, blocks(3)))
        await asyncio.sleep(0.3)
        assert new.is_known_to(server)
        await new.publisher.stop()


async def test_two_directories_of_which_one_is_lost() -> None:
    """Ingresses fail over, and the requests that are on their way are known to the other one."""
    async with directory() as (first, one_address), directory() as (second, other_address):
        addresses = (one_address, other_address)
        async with worker("a", *addresses) as a, worker("b", *addresses) as b, client(*addresses) as one:
            a.publish(BlockStored(0, blocks(1)))
            await until(lambda: all(each.is_known_to(server) for each in (a, b) for server in (first, second)))
            await until(lambda: all(each.stub is not None for each in one._directories))
            assert (await placed(one, "r", 1)).ranked[0] == "a"
            preferred, other = (first, second) if len(first.state._reservations) else (second, first)
            assert len(other.state._reservations) == 0
            await preferred.stop()
            async with asyncio.timeout(DEADLINE_S):
                answer = await one.place(query("s", 1))
                while answer is None:
                    answer = await one.place(query("s", 1))
            assert answer.ranked[0] == "a"
            await until(lambda: len(other.state._reservations) == 2)


async def test_channel_that_is_closed_under_calls() -> None:
    """Scenario: one of many simultaneous calls finds the directory gone. gRPC cancels the others; no request may be."""
    async with directory(kind=Slow) as (server, address), worker("a", address), client(address, deadline_s=5.0) as one:
        assert isinstance(server, Slow)
        await placed(one, "r", 1)
        server.pause_s = 3.0
        calls = [asyncio.create_task(one.place(query(str(number), 1))) for number in range(10)]
        await asyncio.sleep(0.2)
        await one._directories[0].close()
        assert await asyncio.gather(*calls) == [None] * 10


class Slow(DirectoryServer):
    """Takes its time."""

    pause_s = 0.0

    async def Place(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(self.pause_s)
        return await super().Place(request, context)


async def test_slow_directory_delays_nobody() -> None:
    """No answer in time is none; what it may still reserve is given up."""
    async with directory(kind=Slow) as (server, address), worker("a", address), client(address) as one:
        assert isinstance(server, Slow)
        await placed(one, "r", 1)
        server.pause_s = 0.4
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for _ in range(3):
            assert await one.place(query("late", 1)) is None
        assert loop.time() - begin < 1.0
        for number in range(100):  # it is left alone for a while
            assert await one.place(query(f"at once {number}", 1)) is None
        assert loop.time() - begin < 2.0
        server.pause_s = 0.0
        await placed(one, "later", 1)
        await asyncio.sleep(0.5)
        assert server.state._reservations.get("late") is None


async def test_nobody_listens() -> None:
    async with client("127.0.0.1:1") as one:
        for number in range(50):
            assert await one.place(query(str(number), 1)) is None


async def test_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with directory(token="secret") as (server, address):
        async with worker("a", address, token="secret"), worker("b", address, token="wrong"), worker("c", address):
            await until(lambda: "a" in server.state.workers.by_id)
            async with client(address, token="secret") as good, client(address) as bad:
                await placed(good, "r", 1)
                await until(lambda: bad._directories[0].stub is not None)
                assert await bad.place(query("s", 1)) is None
                assert "directory 0: UNAUTHENTICATED: authorization: wrong or missing token" in caplog.messages
            assert set(server.state.workers.by_id) == {"a"}


async def test_health_and_reflection() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with directory() as (_, address), grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflection.ServerReflectionInfo(iter([request])):
            assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_watch_and_stats() -> None:
    async with directory() as (_, address), worker("a", address), grpc.aio.insecure_channel(address) as channel:
        stub = DirectoryStub(channel)
        call = stub.Watch(pb.WatchRequest(period_ms=100))
        names: list[str] = []
        async for stats in call:
            names += [each.worker_id for each in stats.workers]
            if len(names) > 2:
                break
        call.cancel()
        assert set(names) == {"a"}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Watch(pb.WatchRequest(period_ms=5)):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.value.details() or "").startswith("period_ms: ")


async def test_bad_input_on_every_call() -> None:
    async with (
        directory() as (server, address),
        worker("a", address) as a,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = DirectoryStub(channel)
        await until(lambda: a.is_known_to(server))
        for call, code, field in (
            (stub.Place(pb.PlaceRequest(model="m", num_tokens=1)), "INVALID_ARGUMENT", "request_id"),
            (stub.Place(pb.PlaceRequest(request_id="r", model="m")), "INVALID_ARGUMENT", "num_tokens"),
            (
                stub.Place(pb.PlaceRequest(request_id="r", model="m", num_tokens=1, hashes=b"x")),
                "INVALID_ARGUMENT",
                "hashes",
            ),
            (stub.Place(pb.PlaceRequest(request_id="r", model="?", num_tokens=1)), "NOT_FOUND", "no worker"),
            (stub.Lookup(pb.LookupRequest(model="m", hashes=b"x")), "INVALID_ARGUMENT", "hashes"),
            (stub.Lookup(pb.LookupRequest(model="?")), "NOT_FOUND", "no worker"),
            (stub.Place(pb.PlaceRequest(request_id="r", hashes=bytes(17 * 2**20))), "RESOURCE_EXHAUSTED", ""),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code().name == code
            assert (error.value.details() or "").startswith(field)
        for update, code in (
            (pb.WorkerUpdate(), "INVALID_ARGUMENT"),
            (pb.WorkerUpdate(events=pb.EventBatch(epoch=1, seq=1)), "INVALID_ARGUMENT"),
            (pb.WorkerUpdate(hello=pb.Hello(worker_id="b")), "INVALID_ARGUMENT"),
            (
                pb.WorkerUpdate(
                    hello=pb.Hello(
                        worker_id="b", epoch=1, model="m", block_size=7, windows=[0], num_blocks=1, max_num_seqs=1
                    )
                ),
                "FAILED_PRECONDITION",
            ),
        ):
            publish = stub.Publish()
            await publish.write(update)
            with suppress(grpc.aio.AioRpcError):
                while await publish.read() is not grpc.aio.EOF:
                    pass
            assert (await publish.code()).name == code
        assert a.is_known_to(server)
        assert await stub.Release(pb.ReleaseRequest(request_ids=["never heard of"])) == pb.ReleaseResponse()


async def test_garbage() -> None:
    """Bytes that are no messages, on every call: a status each, and the directory goes on."""
    draw = random.Random(3)
    async with (
        directory() as (server, address),
        worker("a", address) as a,
        grpc.aio.insecure_channel(address) as channel,
    ):
        await until(lambda: a.is_known_to(server))
        seen: set[str] = set()
        for number in range(300):
            method = draw.choice(("Place", "Release", "Lookup", "Stats", "Publish", "Watch", "Nothing"))
            data = draw.randbytes(draw.randrange(60)) if number % 2 else mutated(draw)
            kinds = {"Publish": channel.stream_stream, "Watch": channel.unary_stream}
            kind = kinds.get(method, channel.unary_unary)
            call = kind(f"/{SERVICE}/{method}", request_serializer=bytes, response_deserializer=bytes)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    if method == "Publish":
                        async for _ in call(iter([data])):  # type: ignore[operator]
                            pass
                    elif method == "Watch":
                        watching = call(data)  # type: ignore[operator]
                        await anext(aiter(watching))
                        watching.cancel()
                    else:
                        await call(data)  # type: ignore[operator]
            except grpc.aio.AioRpcError as error:
                seen.add(error.code().name)
        assert seen <= {
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "UNIMPLEMENTED",
            "FAILED_PRECONDITION",
            "ABORTED",
        }
        a.publish(BlockStored(0, blocks(1)))
        await until(lambda: a.is_known_to(server))


def mutated(draw: random.Random) -> bytes:
    """A message with some bytes changed."""
    update = pb.WorkerUpdate(
        hello=pb.Hello(
            worker_id="z", epoch=3, model="m", block_size=BLOCK_SIZE, windows=[0], num_blocks=9, max_num_seqs=1
        )
    )
    data = bytearray(update.SerializeToString())
    for _ in range(draw.randrange(4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)
