"""An OpenAI chat server that says what a test tells it to."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEADLINE_S = 30.0


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def usage(*, prompt: int, output: int, cached: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": counts}


class FakeOpenAI:
    """Answers each chat request with the next of `answers`: events to stream, or a status and a body."""

    def __init__(self, models: Sequence[str]) -> None:
        self.models = models
        self.answers: list[list[dict[str, Any] | str] | tuple[int, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.client_left = threading.Event()
        """Set when the client closes the connection of an answer that ended with "HANG"."""
        self.url = ""


@contextmanager
def fake_openai(*models: str) -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI(models)

    class Handler(BaseHTTPRequestHandler):
        timeout = DEADLINE_S

        def do_GET(self) -> None:
            fake.headers.append(dict(self.headers))
            self._send(200, json.dumps({"data": [{"id": model} for model in fake.models]}))

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            fake.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = fake.answers.pop(0)
            if isinstance(answer, tuple):
                self._send(*answer)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in answer:
                if event == "HANG":
                    if self.rfile.read(1) == b"":
                        fake.client_left.set()
                    return
                data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
                self.wfile.write(data.encode())
                self.wfile.flush()

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)
