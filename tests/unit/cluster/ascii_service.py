"""A service whose tokens are characters, and a worker that sends what a test wrote."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pagoda.cluster.ingress.service import InferenceService
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import EngineStoppedError
from pagoda.worker.text_decoder import TextDecoder, WindowDecoder
from pagoda.worker.types import FinishReason, Request, RequestId, SequenceOutput, TokenLogprobs

LIMITS = EngineLimits(max_model_len=100, vocab_size=128, max_num_seqs=4, max_num_waiting=4)
START = "^"
"""A special token."""


class AsciiTokenizer:
    """A token is a character's code. Remembers which thread encoded."""

    def __init__(self) -> None:
        self.encoding_thread: threading.Thread | None = None
        self.max_tokens: list[int | None] = []

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        self.max_tokens.append(max_tokens)
        self.encoding_thread = threading.current_thread()
        start = [ord(START)] if add_special_tokens else []
        return start + [ord(character) for character in text]

    def encode_chat(
        self, messages: Sequence[Any], options: ChatOptions | None = None, *, max_tokens: int | None = None
    ) -> list[int]:
        text = "".join(message["content"] for message in messages)
        adds_special_tokens = options is not None and options.add_special_tokens
        return self.encode(text, add_special_tokens=adds_special_tokens, max_tokens=max_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token == ord(START)))

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        return WindowDecoder(functools.partial(self.decode, skip_special_tokens=skip_special_tokens))


class FakeWorkerClient:
    """Streams batches of outputs that the test wrote, then waits for ever if told to."""

    def __init__(
        self,
        *batches: list[SequenceOutput],
        then_hangs: bool = False,
        then_fails: bool = False,
        error: Exception | None = None,
    ) -> None:
        self.batches = batches
        self.then_fails = then_fails
        self.then_hangs = then_hangs
        self.error = error
        self.requests: list[Request] = []
        self.is_streaming = asyncio.Event()
        self.num_given = 0
        self.completed_samples: list[int] = []
        self.is_closed = False

    async def ping(self) -> None:
        if self.error is not None:
            raise self.error

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        self.requests.append(request)
        self.is_streaming.set()
        try:
            if self.error is not None:
                raise self.error
            for batch in self.batches:
                self.num_given += 1
                yield batch
            if self.then_hangs:
                await asyncio.Event().wait()
            if self.then_fails:
                raise EngineStoppedError("the worker is gone")
        finally:
            self.is_closed = True

    def abort(self, request_id: RequestId) -> None:
        raise AssertionError(f"nobody asked to abort {request_id}")

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        assert request_id == self.requests[-1].request_id
        self.completed_samples.append(index)


def out(
    index: int,
    text: str,
    reason: FinishReason | None = None,
    *,
    stop_reason: int | None = None,
    error: str | None = None,
    cached: int = 0,
    prompt: str = "",
) -> SequenceOutput:
    """With a log probability for each token, and for each of those of `prompt`."""
    return SequenceOutput(
        RequestId("r"),
        index,
        tuple(map(ord, text)),
        reason,
        stop_reason,
        error=error,
        num_cached_tokens=cached,
        logprobs=logprobs(text),
        prompt_logprobs=logprobs(prompt),
    )


def logprobs(text: str) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(ord(character), -1.0, 2, ()) for character in text)


def service(client: FakeWorkerClient) -> InferenceService:
    return InferenceService(AsciiTokenizer(), client, LIMITS)  # type: ignore[arg-type]
