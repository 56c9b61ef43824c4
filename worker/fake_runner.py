"""A model that costs nothing: steps take as long as a simple model of one says, tokens follow from the tokens before.

For load tests of everything around the model: scheduler, KV manager, streams and routing are the real ones.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import torch

from pagoda.worker.errors import IntegrityError
from pagoda.worker.parallel import SINGLE, TPContext
from pagoda.worker.types import ModelRunnerOutput, NewSequence, SchedulerOutput, SequenceId, TokenLogprobs

_FIRST_TOKEN_ID = 256
"""Below, byte-level vocabularies hold special and single-byte tokens."""


@dataclass(slots=True)
class _Row:
    state: int
    """Digest of all tokens, and of the seed where tokens are drawn."""
    num_tokens: int
    num_computed_tokens: int
    num_top: int | None
    """Alternatives to tell of each token; None tells nothing."""
    owed: "_OwedPrompt | None"


class FakeRunner:
    """Implements `Executor`.

    A step takes `step_s`, and `token_s` more for each token it computes. Like those of a real model, a greedy answer
    depends on the tokens before only, one that is sampled on the seed too: the same alone, batched, preempted, or
    on another worker. So do the log probabilities that it makes up. Of several ranks, all compute everything, and must
    find what the first one finds.
    """

    def __init__(self, *, step_s: float, token_s: float = 0.0, vocab_size: int, context: TPContext = SINGLE) -> None:
        self._context = context
        self._step_s = step_s
        self._token_s = token_s
        self._num_drawn = max(1, vocab_size - _FIRST_TOKEN_ID)
        self._rows: dict[SequenceId, _Row] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        end = time.monotonic() + self._step_s + self._token_s * sum(plan.num_scheduled_tokens.values())
        for sequence_id in plan.dropped:
            self._rows.pop(sequence_id, None)
        for new in plan.new:
            self._rows[new.sequence_id] = _row_of(new)
        sampled: dict[SequenceId, int] = {}
        result = ModelRunnerOutput(sampled)
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows[sequence_id]
            row.num_computed_tokens += num_tokens
            if row.owed is not None and (told := row.owed.up_to(row.num_computed_tokens, self._logprobs)):
                result.prompt_logprobs[sequence_id] = told
            if row.num_computed_tokens == row.num_tokens:
                token = self._guess(row.state)
                sampled[sequence_id] = token
                if row.num_top is not None:
                    result.logprobs[sequence_id] = self._logprobs(token, row.state, row.num_top)
                row.state = crc32(array("q", [token]), row.state)
                row.num_tokens += 1
        if sampled and self._context.size > 1:
            self._agree(list(sampled.values()))
        left_s = end - time.monotonic()
        if plan.num_scheduled_tokens and left_s > 0:
            time.sleep(left_s)
        return result

    def _guess(self, state: int, place: int = 0) -> int:
        """The most probable token after tokens of this digest, or one behind it."""
        return _FIRST_TOKEN_ID + (state + place) % self._num_drawn

    def _logprobs(self, token_id: int, state: int, num_top: int) -> TokenLogprobs:
        logprob = -(state % 1024) / 1024  # a number that float32 holds
        is_first = token_id == self._guess(state)
        return TokenLogprobs(
            token_id,
            logprob if is_first else logprob - num_top,
            1 if is_first else num_top + 1,
            tuple((self._guess(state, place), logprob - place) for place in range(num_top)),
        )

    def _agree(self, tokens: list[int]) -> None:
        """As real ranks do, take the first one's tokens; but here they must be our own."""
        first = self._context.from_first(tokens, torch.device("cpu"))
        if first != tokens:
            raise IntegrityError(f"rank {self._context.rank} computes {tokens}, the first one {first}")

    def shutdown(self) -> None:
        self._rows.clear()


class _OwedPrompt:
    """The tokens of a prompt whose log probabilities are owed, and how far that has come."""

    def __init__(self, new: NewSequence, num_top: int, state: int) -> None:
        """`state` is the digest of no tokens."""
        self._token_ids = new.token_ids[: len(new.token_ids) - new.num_output_tokens]
        self._num_top = num_top
        self._next = new.next_prompt_logprob
        self._state = crc32(array("q", self._token_ids[: self._next]), state)

    def up_to(
        self, num_computed_tokens: int, tell: Callable[[int, int, int], TokenLogprobs]
    ) -> tuple[TokenLogprobs, ...]:
        """Of all tokens that follow computed ones, each once. `tell` takes a token, the digest of those before it, and

        how many alternatives.
        """
        end = min(num_computed_tokens + 1, len(self._token_ids))
        told = []
        for token_id in self._token_ids[self._next : end]:
            told.append(tell(token_id, self._state, self._num_top))
            self._state = crc32(array("q", [token_id]), self._state)
        self._next = max(self._next, end)
        return tuple(told)


def _row_of(new: NewSequence) -> _Row:
    sampling = new.sampling
    seed = 0 if sampling.temperature == 0 else new.seed % 2**32
    owed = None if sampling.prompt_logprobs is None else _OwedPrompt(new, sampling.prompt_logprobs, seed)
    return _Row(
        crc32(array("q", new.token_ids), seed), len(new.token_ids), new.num_computed_tokens, sampling.logprobs, owed
    )
