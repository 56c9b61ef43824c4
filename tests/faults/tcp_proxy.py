"""A TCP proxy that stands between two parts of a cluster and is a bad network, or none.

client ──► TcpProxy ──► wherever `target` says now
             delay_s, bytes_per_s: slow      is_mute: takes everything, passes on nothing (a partition)
             cut(): all connections reset    is_refusing: new ones are reset, as when nobody listens
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

_PIECE_BYTES = 16 * 1024


class TcpProxy:
    """Make and use it on one event loop. What is set holds for connections that are open, too."""

    def __init__(self, target: Callable[[], Awaitable[str]]) -> None:
        """`target` says where a new connection goes, host:port."""
        self._target = target
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._speaks = asyncio.Event()
        self._speaks.set()
        self.delay_s = 0.0
        """Of each piece of data, in both directions."""
        self.bytes_per_s: float | None = None
        self.is_refusing = False
        self.num_connections = 0
        """That were ever made."""

    async def start(self, host: str = "127.0.0.1") -> str:
        """Listen on a free port. Returns host:port."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def address(self) -> str:
        """Where it listens; as a directory is asked for its address."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    @property
    def is_mute(self) -> bool:
        """Whether data stays here. Connections are taken all the same, as by a host that has vanished from its net."""
        return not self._speaks.is_set()

    @is_mute.setter
    def is_mute(self, is_mute: bool) -> None:
        if is_mute:
            self._speaks.clear()
        else:
            self._speaks.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        relay = asyncio.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self.is_refusing:
                return
            await self._speaks.wait()
            host, _, port = (await self._target()).rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._writers.add(far_writer)
            try:
                directions = [
                    asyncio.create_task(self._copy(reader, far_writer)),
                    asyncio.create_task(self._copy(far_reader, writer)),
                ]
                try:
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for direction in directions:
                        direction.cancel()
                    await asyncio.gather(*directions, return_exceptions=True)
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass  # nobody is there, as the client sees in a moment
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                await self._speaks.wait()
                writer.write(data)
                await writer.drain()
