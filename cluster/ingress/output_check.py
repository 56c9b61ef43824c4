"""What comes from a worker is looked at before it is believed. One that lies, or is broken, is as good as lost."""

from collections.abc import Sequence

from pagoda.worker.config import EngineLimits
from pagoda.worker.types import FinishReason, Request, SequenceOutput, TokenLogprobs

_MOST_LOGPROB = 0.01
"""0 and what rounding may add."""


class OutputCheck:
    """For one request, over all the workers that it is tried on."""

    def __init__(self, request: Request, limits: EngineLimits) -> None:
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_samples = request.sampling.n
        self._vocab_size = limits.vocab_size
        room = limits.max_model_len - self._num_prompt_tokens
        self._most_tokens = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        self._has_logprobs = request.sampling.logprobs is not None
        self._num_tokens = [0] * request.sampling.n
        self._num_prompt_logprobs = 0

    def problem_with(self, output: SequenceOutput) -> str | None:
        """Why it cannot be the next one of its sample, if so."""
        if not 0 <= output.index < self._num_samples:
            return f"a worker sent sample {output.index} of {self._num_samples}"
        for token_id in output.token_ids:
            if not 0 <= token_id < self._vocab_size:
                return f"a worker sent token {token_id} of {self._vocab_size}"
        self._num_tokens[output.index] += len(output.token_ids)
        if self._num_tokens[output.index] > self._most_tokens:
            return f"a worker sent more than {self._most_tokens} tokens"
        if not 0 <= output.num_cached_tokens <= self._num_prompt_tokens:
            return f"a worker found {output.num_cached_tokens} of {self._num_prompt_tokens} tokens"
        is_abnormal = output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        if self._has_logprobs and len(output.logprobs) != len(output.token_ids) and not is_abnormal:
            return "a worker sent tokens without their log probabilities"
        if output.prompt_logprobs:
            self._num_prompt_logprobs += len(output.prompt_logprobs)
            if self._num_prompt_logprobs >= self._num_prompt_tokens:
                return "a worker sent log probabilities of more tokens than the prompt has"
        entries = output.logprobs + output.prompt_logprobs
        return self._problem_with_logprobs(entries) if entries else None

    def _problem_with_logprobs(self, entries: Sequence[TokenLogprobs]) -> str | None:
        for token_id, logprob in (pair for entry in entries for pair in ((entry.token_id, entry.logprob), *entry.top)):
            if not 0 <= token_id < self._vocab_size:
                return f"a worker sent the log probability of token {token_id} of {self._vocab_size}"
            if not logprob <= _MOST_LOGPROB:  # nor is NaN
                return f"a worker sent {logprob} as a log probability"
        return None
