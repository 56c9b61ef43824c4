"""The bad network does what it says, or the tests behind it would prove nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tcp_proxy import TcpProxy

DEADLINE_S = 20.0


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[TcpProxy]:
    """Before a server that sends back what it gets."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)

    async def target() -> str:
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    one = TcpProxy(target)
    await one.start()
    yield one
    await one.close()
    server.close()


@asynccontextmanager
async def connection(proxy: TcpProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = (await proxy.address()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield reader, writer
    finally:
        writer.transport.abort()


async def test_bytes_pass(proxy: TcpProxy) -> None:
    data = bytes(range(256)) * 1000
    async with connection(proxy) as (reader, writer):
        writer.write(data)
        assert await reader.readexactly(len(data)) == data


async def test_a_mute_one_loses_nothing_and_tells_nothing(proxy: TcpProxy) -> None:
    async with connection(proxy) as (reader, writer):
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.is_mute = True
        writer.write(b"b")
        reading = asyncio.create_task(reader.readexactly(1))
        async with connection(proxy) as (other_reader, other_writer):  # others are taken, and hear nothing either
            other_writer.write(b"c")
            other_reading = asyncio.create_task(other_reader.readexactly(1))
            await asyncio.wait({reading, other_reading}, timeout=0.1)
            assert not reading.done()
            assert not other_reading.done()
            proxy.is_mute = False
            assert (await reading, await other_reading) == (b"b", b"c")


async def test_a_cut_resets_what_is_open_only(proxy: TcpProxy) -> None:
    async with connection(proxy) as (reader, writer):
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.cut()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
    await test_bytes_pass(proxy)


async def test_refusal(proxy: TcpProxy) -> None:
    proxy.is_refusing = True
    async with connection(proxy) as (reader, _):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_delay_and_rate_hold_up_what_passes(proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(duration_s: float) -> None:
        waits.append(duration_s)
        await sleep(0)

    proxy.delay_s, proxy.bytes_per_s = 0.5, 10.0
    async with connection(proxy) as (reader, writer):
        monkeypatch.setattr(asyncio, "sleep", note)
        writer.write(b"ab")
        await reader.readexactly(2)
    assert waits == [0.5, 0.2, 0.5, 0.2]  # there and back
