"""A server that answers each POST with bytes that a test gives, at the pace it gives; and knows one model."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

RESET, HANG, ASKED_AGAIN = object(), object(), object()
"""Within a script: break the connection; say nothing more until the client goes; wait for its next request."""
Script = Sequence[bytes | float | object]
"""Bytes to send, seconds to wait, or one of the above."""


def event(data: dict[str, Any] | str) -> bytes:
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


def text(content: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]})


def delta(content: str | None, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}]})


def usage(*, prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts})


def head(status: int = 200, content_type: str = "text/event-stream") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nConnection: close\r\n\r\n".encode()


DONE = event("[DONE]")


def answered(*pieces: str, cached: int = 0, prompt: int = 10) -> list[bytes]:
    """A whole completion."""
    texts = [text(piece, "length" if i + 1 == len(pieces) else None) for i, piece in enumerate(pieces)]
    return [head(), *texts, usage(prompt=prompt, output=len(pieces), cached=cached), DONE]


@dataclass(slots=True)
class ScriptedServer:
    """`script_of(path, body)` says how a request is answered."""

    script_of: Callable[[str, dict[str, Any]], Script]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = request.split(" ", 2)
            if method == "GET":
                writer.write(head(content_type="application/json") + b'{"data": [{"id": "m"}]}')
                await writer.drain()
                return
            fields = dict(line.lower().split(": ", 1) for line in request.split("\r\n")[1:] if ": " in line)
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            self.bodies.append(body)
            for step in self.script_of(path, body):
                if step is RESET:
                    writer.transport.abort()
                    return
                if step is ASKED_AGAIN:
                    await reader.read(1)
                elif step is HANG:
                    await reader.read()
                elif isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted_server(script_of: Callable[[str, dict[str, Any]], Script]) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer(script_of)
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    async with server:
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield scripted
