"""What a load test sends, what comes back, and whom it can send to.

Kinds of failure:

    refused      no connection        reset      the connection broke before or within the answer
    timeout      not answered in time    cut     the answer ended without a finish reason
    http_CODE    a status, such as http_429    grpc_CODE   the same of gRPC, such as grpc_resource_exhausted
    error_event  an error within a stream    garbage    an answer that is none
    interrupted  the load test was stopped
    client       this client could not send it
"""

from dataclasses import dataclass, field
from typing import Protocol

from pagoda.cluster.loadtest.workloads import TokenIds
from pagoda.worker.errors import PagodaError

Message = dict[str, str]
TOKENIZE_TIMEOUT_S = 30.0


class TargetError(PagodaError):
    """The server cannot be used at all."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is sent: messages for a chat, else token ids or text to be continued."""

    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: str | TokenIds = ()
    seed: int | None = None
    """Of what is drawn to answer it; None leaves that to the server."""


@dataclass(slots=True)
class Answer:
    """An answer as it grows. `piece_s` are the times at which text came."""

    text: list[str] = field(default_factory=list)
    piece_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    end_s: float | None = None
    """When it was whole, if a target knows better than that `send` returned."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    """As the server counts; None if it does not say."""
    num_resent: int = 0
    """Times that it was sent again, since a connection from before was found closed."""


def check_counts(answer: Answer, max_tokens: int) -> None:
    """Raise `SendError` for counts that cannot be, before they get into any figure. One token more may be its end."""
    if (answer.num_output_tokens or 0) > max_tokens + 1:
        raise SendError("garbage", f"counts {answer.num_output_tokens} tokens where {max_tokens} were allowed")
    prompt, cached = answer.num_prompt_tokens, answer.num_cached_tokens
    if prompt is not None and cached is not None and cached > prompt:
        raise SendError("garbage", f"counts {cached} of {prompt} tokens as cached")


class SendError(Exception):
    """A request failed. `kind` is one of those above."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail[:300]


class Target(Protocol):
    """A server under load."""

    model: str
    """Which of its models is asked."""

    async def models(self) -> list[str]:
        """Names of what is served. Raises `TargetError`."""

    async def send(self, request: LoadRequest, answer: Answer) -> None:
        """Fill `answer` until it ends. Raises `SendError`."""

    async def tokenize(self, request: LoadRequest) -> list[int] | None:
        """The prompt's tokens as the server counts them; None if it cannot say."""

    async def close(self) -> None: ...
