"""What became of each request of a load test. Times are seconds since the test began."""

import hashlib
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pagoda.cluster.loadtest.target import Answer, LoadRequest, SendError


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, ended."""

    session: int
    turn: int
    intended_s: float
    """When it was to be sent. Everything is counted from here, or a slow server would seem faster than it is."""
    sent_s: float
    first_s: float | None
    """When the first text came."""
    end_s: float
    gaps_s: tuple[float, ...] = ()
    """Between pieces of text."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    num_resent: int = 0
    prompt_digest: str = ""
    """Of what was asked."""
    text_digest: str = ""
    """Of the answer's text: equal digests, equal answers."""
    error: str | None = None
    """A kind of failure, of those in `target.py`; None if it succeeded."""
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token behind the first; None for a single one."""
        if self.first_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_output_tokens - 1)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def record_of(
    request: LoadRequest,
    answer: Answer,
    session: int,
    turn: int,
    *,
    intended_s: float,
    sent_s: float,
    end_s: float,
    error: SendError | None,
) -> RequestRecord:
    """What is kept of an answer. Tokens are pieces of text where the server does not count them."""
    times = answer.piece_s
    return RequestRecord(
        session,
        turn,
        intended_s,
        sent_s,
        first_s=times[0] if times else None,
        end_s=end_s,
        gaps_s=tuple(after - before for before, after in pairwise(times)),
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        num_output_tokens=len(times) if answer.num_output_tokens is None else answer.num_output_tokens,
        num_resent=answer.num_resent,
        prompt_digest=_digest(
            repr((request.messages, request.prompt, request.max_tokens, *filter(None, [request.seed])))
        ),
        text_digest=_digest("".join(answer.text)),
        error=None if error is None else error.kind,
        detail="" if error is None else error.detail,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
