"""Clients that do everything wrong: what they send, how they read, when they leave. None of it may be felt by others.

Each kind says which statuses it may be answered with. While a part of the service is being replaced, a broken
connection or what the proxy says of itself is an answer, too; a 500 of ours never is.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import httpx

_LIMIT_S = 30.0
"""Within which each of them must have its answer."""
_LONG_TOKENS = 400
_GATEWAY_STATUSES = {502, 503, 504}
_HUGE_BYTES = 6 * 2**20
_METHODS = ("Generate", "Chat", "Tokenize", "Abort", "Nothing")


def is_of_the_proxy(text: str) -> bool:
    """Whether an error is Serve's HAProxy's own: of an ingress that just died, or, when it has just begun, of all."""
    return text.startswith("Internal Server Error") or "Path '" in text


class BadClients:
    """Against one service, over HTTP and gRPC, until they are told to stop."""

    def __init__(
        self, url: str, grpc_address: str, model: str, seed: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`say` hears of each answer that may not be."""
        self._say = say
        self._http = httpx.AsyncClient(base_url=url, timeout=_LIMIT_S)
        self._host, _, port = url.rpartition("/")[2].rpartition(":")
        self._port = int(port)
        self._grpc_address = grpc_address
        self._model = model
        self._draw = random.Random(f"{seed} bad clients")
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "bad_json": lambda: self._post(b'{"model": ', {400}),
            "no_text": lambda: self._post(bytes(self._draw.randrange(256) for _ in range(200)), {400}),
            "deep_json": lambda: self._post(b"[" * 100_000, {400}),
            "bad_field": lambda: self._post(self._body(n=0), {400}),
            "unknown_field": lambda: self._post(self._body(colour="red"), {400}),
            "too_long": lambda: self._post(self._body(max_tokens=10**9), {400}),
            "other_model": lambda: self._post(self._body(model="nobody's"), {404}),
            "huge_body": lambda: self._post(b" " * _HUGE_BYTES, {400, 413}),
            "grpc_garbage": self._send_grpc_garbage,
            "no_grpc": self._send_no_grpc,
            "half_a_request": self._send_half,
            "leaves": self._leave,
            "reads_slowly": self._read_slowly,
        }
        self.num_sent: Counter[str] = Counter()
        self.num_broken: Counter[str] = Counter()
        """Connections that broke or were refused, by kind."""
        self.problems: list[str] = []
        """Answers that may not be."""
        self.is_stopping = False

    async def run(self, num_clients: int) -> None:
        """Until `is_stopping`."""
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(num_clients):
                    clients.create_task(self._be_client())
        finally:
            await self._http.aclose()

    async def _be_client(self) -> None:
        while not self.is_stopping:
            kind = self._draw.choice([*self._kinds])
            self.num_sent[kind] += 1
            begin_s = time.monotonic()
            try:
                async with asyncio.timeout(_LIMIT_S + 5):
                    await self._kinds[kind]()
            except (TimeoutError, httpx.TimeoutException):
                self._complain(f"{kind}: no answer within {time.monotonic() - begin_s:.0f} s")
            except (httpx.HTTPError, OSError, asyncio.IncompleteReadError):
                self.num_broken[kind] += 1
            except Exception as error:  # noqa: BLE001  (whatever it is, the others go on)
                self._complain(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(0.2 * self._draw.random())

    def _body(self, **fields: Any) -> bytes:
        return json.dumps({"model": self._model, "prompt": "Once", "max_tokens": 4, **fields}).encode()

    async def _post(self, content: bytes, expected: set[int]) -> None:
        response = await self._http.post("/v1/completions", content=content)
        if is_of_the_proxy(response.text):
            self.num_broken["proxy"] += 1
        elif response.status_code not in expected | _GATEWAY_STATUSES:
            self._complain(f"{response.status_code} instead of {sorted(expected)}: {response.text[:200]!r}")

    def _complain(self, problem: str) -> None:
        self.problems.append(problem)
        self._say(f"PROBLEM {problem}")

    async def _send_grpc_garbage(self) -> None:
        """Bytes that are no message, to methods that there are and one that there is not."""
        method = f"/pagoda.v1.Inference/{self._draw.choice(_METHODS)}"
        garbage = bytes(self._draw.randrange(256) for _ in range(self._draw.randrange(1, 2000)))
        async with grpc.aio.insecure_channel(self._grpc_address) as channel:
            try:
                async for _ in channel.unary_stream(method)(garbage, timeout=_LIMIT_S):
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from error

    async def _send_no_grpc(self) -> None:
        """Bytes that are not even HTTP/2."""
        host, _, port = self._grpc_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(bytes(self._draw.randrange(256) for _ in range(1000)))
            await writer.drain()
            await asyncio.sleep(0.1)
        finally:
            writer.transport.abort()

    async def _send_half(self) -> None:
        _, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: half\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(2 * self._draw.random())
        finally:
            writer.transport.abort()

    async def _leave(self) -> None:
        """In the middle of an answer."""
        async with self._http.stream("POST", "/v1/completions", content=self._long_stream()) as response:
            async for _ in response.aiter_raw(64):
                if self._draw.random() < 0.05:
                    return

    async def _read_slowly(self) -> None:
        """A few bytes a second, and then no more."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=256)
        body = self._long_stream()
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: slow\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            for _ in range(self._draw.randrange(4, 12)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await reader.read(64)
                await asyncio.sleep(0.25)
        finally:
            writer.transport.abort()

    def _long_stream(self) -> bytes:
        return self._body(max_tokens=_LONG_TOKENS, stream=True)
