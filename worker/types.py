"""Messages between the parts of a replica, and between a replica and who calls it. Standard library only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType

from pagoda.worker.errors import InvalidRequestError

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", str)
"""One sample of a request: `<request id>/<index>`."""

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_TEMPERATURE = 1000.0
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
"""Alternatives that are reported for each token."""
MAX_PROMPT_LOGPROBS = 2**20
"""Log probabilities that are reported of one prompt: its tokens times one more than the alternatives of each."""
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted sequence ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    """Its time was over."""
    SHED = "shed"
    """Nothing was done for it: others went first for good, or it would have come too late."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings as in the OpenAI API and vLLM."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this times the most probable one."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that it is in the output."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by this if positive, else multiplied by it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id -> what is added to its logit."""
    seed: int | None = None
    """Same seed, same random numbers, however the request is batched. None draws one."""
    n: int = 1
    """Samples per prompt."""
    max_tokens: int | None = 16
    """Most tokens to generate; None generates up to the context length."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """Whether the stop string or token that ends the text is a part of it."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    logprobs: int | None = None
    """Report each output token's log probability, and those of this many most probable tokens; None reports none.

    They are the model's own: before penalties, bias, temperature and filters.
    """
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens from the second on."""

    @property
    def adjusts_logits(self) -> bool:
        """Whether a penalty or bias changes the logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
        )

    def validate(self) -> None:
        """Raise `InvalidRequestError` naming the first field out of range."""

        def require(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise InvalidRequestError(name, f"must be {allowed}, got {getattr(self, name)!r}")

        require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"a number in [0, {MAX_TEMPERATURE}]")
        require(self.top_k >= -1, "top_k", "-1 or 0 (off) or a positive integer")
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            require(-MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY, name, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
        require(0 < self.repetition_penalty < math.inf, "repetition_penalty", "a finite number > 0")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequestError("logit_bias", f"must be at most {MAX_LOGIT_BIASES}, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                allowed = f"token ids >= 0 with numbers in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
                raise InvalidRequestError("logit_bias", f"must be {allowed}, got {token_id}: {bias}")
        require(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"in [0, {MAX_SEED}]")
        require(1 <= self.n <= MAX_SAMPLES, "n", f"in [1, {MAX_SAMPLES}]")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self.min_tokens >= 0, "min_tokens", "at least 0")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        require(all(self.stop), "stop", "non-empty strings")
        require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", "token ids >= 0")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"in [0, {MAX_LOGPROBS}]")


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """What a client has of one sample of a request that another worker has begun."""

    token_ids: tuple[int, ...] = ()
    """Generated tokens, which count as output and not as prompt."""
    has_ended: bool = False
    """It needs no more."""


NEW_SAMPLE = SampleProgress()


def attempt_id(request_id: RequestId, number: int) -> RequestId:
    """What a request is called when it is tried for the `number`-th time, counted from 0.

    Each time differently, so that what a worker still says of one attempt is never taken for the next one's. Never as
    the request itself, whose name stands for all of them: who ends a lost attempt must not end the next one.
    """
    return RequestId(f"{request_id}~{number}")


def is_attempt_of(attempt: RequestId, request_id: RequestId) -> bool:
    """Whether `attempt` is one of `attempt_id(request_id, ...)`."""
    base, _, number = attempt.rpartition("~")
    return attempt == request_id or (base == request_id and number.isdecimal())


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenised request, as it enters the engine."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower goes first; equal priorities are first come, first served."""
    salt: bytes = b""
    """Only requests with the same salt share cached blocks."""
    num_public_tokens: int = 0
    """Tokens at its start that everybody may share, whatever the salt: of these, whole blocks are."""
    tenant: str = ""
    """Whose it is; empty where nobody is told apart. Tenants take turns."""
    weight: float = 1.0
    """The tenant's share, beside the shares of others."""
    timeout_s: float | None = None
    """Seconds that it may take, from when a worker accepts it; None sets no limit."""
    waited_s: float = 0.0
    """Since its ingress began to look for a worker."""
    progress: tuple[SampleProgress, ...] = ()
    """Of a request that another worker has begun, where each sample stands; empty for a new one."""
    num_told_prompt_logprobs: int = 0
    """Prompt tokens, from the second on, whose log probabilities the client has."""
    runs_alone: bool = False
    """Nothing else runs on its worker while it does: others have died with it."""

    def progress_of(self, index: int) -> SampleProgress:
        """Where one of its samples stands."""
        return self.progress[index] if index < len(self.progress) else NEW_SAMPLE

    @property
    def live_samples(self) -> tuple[int, ...]:
        """Its samples that have not ended, by index."""
        return tuple(index for index in range(self.sampling.n) if not self.progress_of(index).has_ended)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of one token of a prompt or output, given those before it, and of its alternatives."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the most probable tokens, best first; the token itself may be among them."""


@dataclass(slots=True)  # not frozen: to make a frozen one takes four times as long, and one is made for each token
class SequenceOutput:
    """What one step brought for one sequence. The last one of a sequence carries `finish_reason`."""

    request_id: RequestId
    index: int
    """Which of the request's `n` samples."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended it, if one did other than end-of-sequence."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache when the sequence was first admitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens, from the second on, as they are computed; only with sample 0, each once."""

    def merged_with(self, later: "SequenceOutput") -> "SequenceOutput":
        """This output and the next one of the same sequence as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class NewSequence:
    """All a rank needs to run a sequence it does not hold: a new one, or one back from preemption."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    num_output_tokens: int
    """How many of `token_ids`, at their end, were generated."""
    num_computed_tokens: int
    """Tokens whose KV the block table already holds."""
    num_shared_tokens: int
    """Tokens in blocks that others may read: never written again."""
    block_tables: tuple[tuple[int, ...], ...]
    """Block ids, per group. Where a window hides a block for good, another one stands."""
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    next_prompt_logprob: int
    """Index of the first prompt token whose log probability is owed; the prompt's length if none is."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan. Ranks keep state, so it says only what changed; apply it in the order of its fields."""

    step: int
    dropped: list[SequenceId] = field(default_factory=list)
    """Sequences that ended or were preempted since the last step; ones a rank does not hold are ignored."""
    new: list[NewSequence] = field(default_factory=list)
    block_updates: list[tuple[SequenceId, int, int, int]] = field(default_factory=list)
    """(sequence, group, index in its table, block id): appended or replaced table entries."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) block ids to copy, all groups and layers, before anything is written."""
    num_scheduled_tokens: dict[SequenceId, int] = field(default_factory=dict)
    """Tokens to compute per sequence; those that decode come first."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step computed."""

    sampled: dict[SequenceId, int]
    """One token for each scheduled sequence that has none of its tokens left to compute."""
    logprobs: dict[SequenceId, TokenLogprobs] = field(default_factory=dict)
    """Of sampled tokens, for sequences that ask for them."""
    prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Of the prompt tokens that the step computed and that are owed, in order."""
