"""A model that costs nothing: steps take a given time and tokens follow from the seed.

For load tests of everything around the model: scheduler, KV manager, streams and routing are the real ones.
"""

import time
from dataclasses import dataclass

from pagoda.worker.types import ModelRunnerOutput, SchedulerOutput, SequenceId

_FIRST_TOKEN_ID = 256
"""Below, byte-level vocabularies hold special and single-byte tokens."""


@dataclass(slots=True)
class _Row:
    seed: int
    num_tokens: int
    num_computed_tokens: int


class FakeRunner:
    """Implements `Executor`."""

    def __init__(self, *, step_s: float, vocab_size: int) -> None:
        self._step_s = step_s
        self._num_drawn = max(1, vocab_size - _FIRST_TOKEN_ID)
        self._rows: dict[SequenceId, _Row] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        end = time.monotonic() + self._step_s
        for sequence_id in plan.dropped:
            self._rows.pop(sequence_id, None)
        for new in plan.new:
            self._rows[new.sequence_id] = _Row(new.seed, len(new.token_ids), new.num_computed_tokens)
        sampled = {}
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows[sequence_id]
            row.num_computed_tokens += num_tokens
            if row.num_computed_tokens == row.num_tokens:
                sampled[sequence_id] = _FIRST_TOKEN_ID + (row.seed + 7919 * row.num_tokens) % self._num_drawn
                row.num_tokens += 1
        if sampled:
            time.sleep(max(0.0, end - time.monotonic()))
        return ModelRunnerOutput(sampled)

    def shutdown(self) -> None:
        self._rows.clear()
