"""A model that costs nothing: steps take as long as a simple model of one says, tokens follow from the tokens before.

For load tests of everything around the model: scheduler, KV manager, streams and routing are the real ones.
"""

import time
from array import array
from dataclasses import dataclass
from zlib import crc32

import torch

from pagoda.worker.errors import IntegrityError
from pagoda.worker.parallel import SINGLE, TPContext
from pagoda.worker.types import ModelRunnerOutput, NewSequence, SchedulerOutput, SequenceId

_FIRST_TOKEN_ID = 256
"""Below, byte-level vocabularies hold special and single-byte tokens."""


@dataclass(slots=True)
class _Row:
    state: int
    """Digest of all tokens, and of the seed where tokens are drawn."""
    num_tokens: int
    num_computed_tokens: int


class FakeRunner:
    """Implements `Executor`.

    A step takes `step_s`, and `token_s` more for each token it computes. Like those of a real model, a greedy answer
    depends on the tokens before only, one that is sampled on the seed too: the same alone, batched, preempted, or
    on another worker. Of several ranks, all compute everything, and must find what the first one finds.
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
            self._rows[new.sequence_id] = _Row(_state_of(new), len(new.token_ids), new.num_computed_tokens)
        sampled = {}
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows[sequence_id]
            row.num_computed_tokens += num_tokens
            if row.num_computed_tokens == row.num_tokens:
                token = _FIRST_TOKEN_ID + row.state % self._num_drawn
                sampled[sequence_id] = token
                row.state = crc32(array("q", [token]), row.state)
                row.num_tokens += 1
        if sampled and self._context.size > 1:
            self._agree(list(sampled.values()))
        left_s = end - time.monotonic()
        if plan.num_scheduled_tokens and left_s > 0:
            time.sleep(left_s)
        return ModelRunnerOutput(sampled)

    def _agree(self, tokens: list[int]) -> None:
        """As real ranks do, take the first one's tokens; but here they must be our own."""
        first = self._context.from_first(tokens, torch.device("cpu"))
        if first != tokens:
            raise IntegrityError(f"rank {self._context.rank} computes {tokens}, the first one {first}")

    def shutdown(self) -> None:
        self._rows.clear()


def _state_of(new: NewSequence) -> int:
    seed = 0 if new.sampling.temperature == 0 else new.seed % 2**32
    return crc32(array("q", new.token_ids), seed)
