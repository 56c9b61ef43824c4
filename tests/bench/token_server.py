"""A server that only streams tokens, as cheaply as can be: `python token_server.py TOKENS_PER_S`. Says its port.

Answers every POST with `max_tokens` events in real time, a token each, many streams at once.
"""

import asyncio
import json
import sys

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(data: str) -> bytes:
    return chunk(b"data: " + data.encode() + b"\n\n")


def piece(finish_reason: str | None) -> bytes:
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": finish_reason}
    return event(json.dumps({"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": [choice]}))


_PIECE, _LAST, _DONE = piece(None), piece("length"), event("[DONE]") + b"0\r\n\r\n"


class TokenStream(asyncio.Protocol):
    """One connection; a request at a time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            answer = b'{"data": [{"id": "m"}]}'
            self._transport.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)
            self._received = b""
            return
        length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))[15:])
        if len(body) >= length:
            self._received = b""
            self._transport.write(_HEAD)
            self._left = self._num_tokens = json.loads(body)["max_tokens"]
            asyncio.get_running_loop().call_later(self._period_s, self._send)

    def _send(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._transport.write(_PIECE)
            asyncio.get_running_loop().call_later(self._period_s, self._send)
            return
        usage = {"prompt_tokens": 1, "completion_tokens": self._num_tokens}
        self._transport.write(_LAST + event(json.dumps({"choices": [], "usage": usage})) + _DONE)


async def main() -> None:
    period_s = 1 / float(sys.argv[1])
    server = await asyncio.get_running_loop().create_server(lambda: TokenStream(period_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
