"""One sample of a request while the scheduler works on it.

WAITING --admit--> RUNNING --finish--> FINISHED
   ^                  |
   +---- preempt -----+            WAITING --abort--> FINISHED
"""

from enum import Enum

from pagoda.worker.block_hash import BlockHash, HashChain
from pagoda.worker.types import FinishReason, NewSequence, Request, SequenceId, SequenceOutput, TokenLogprobs

_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_MASK = 2**63 - 1


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Mutable state of one sample. The scheduler owns it."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_size",
        "charge",
        "eos_token_ids",
        "finish_reason",
        "hash_chain",
        "index",
        "max_tokens",
        "next_prompt_logprob",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "parent",
        "request",
        "seed",
        "sequence_id",
        "start_step",
        "state",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        arrival: int,
        seed: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        hash_chain: HashChain | None,
        block_size: int,
        parent: "Sequence | None" = None,
    ) -> None:
        self.request = request
        self.index = index
        self.sequence_id = SequenceId(f"{request.request_id}/{index}")
        self.arrival = arrival
        self.order = (request.priority, 0.0, arrival, index)
        """Of those that run, who goes first: lowest. The second number says when it was its tenant's turn."""
        self.charge = 0.0
        """What its tenant's account was charged as it was started, tokens."""
        self.seed = seed
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        self.hash_chain = hash_chain
        """None: its blocks are neither looked up nor published."""
        self.block_size = block_size
        self.parent = parent
        """The sample whose prompt blocks this one will share; None once that is settled."""
        self.state = SequenceState.WAITING
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = [*request.prompt_token_ids, *request.progress_of(index).token_ids]
        # Samples share their prompt, so one of them tells its log probabilities for all.
        is_asked = request.sampling.prompt_logprobs is not None and index == 0
        num_told = 1 + request.num_told_prompt_logprobs if is_asked else self.num_prompt_tokens
        self.next_prompt_logprob = min(num_told, self.num_prompt_tokens)
        """Index of the first prompt token whose log probability is owed; the prompt's length if none is."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_expected_tokens = 0
        """Found in the cache when it came; it may be more or less by the time it starts."""
        self.num_preemptions = 0
        self.block_hashes: list[BlockHash] = []
        self.start_step = 0
        """The step it was last admitted in."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token. Returns why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        if len(self.token_ids) % self.block_size == 0:
            self._extend_hashes()
        sampling = self.request.sampling
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        if num_output_tokens > sampling.min_tokens:
            if not sampling.ignore_eos and token_id in self.eos_token_ids:
                return FinishReason.STOP
            if token_id in sampling.stop_token_ids:
                self.stop_reason = token_id
                return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_tokens else None

    def start(self, block_tables: tuple[tuple[int, ...], ...], num_shared_tokens: int) -> NewSequence:
        """What a rank must know to run it; of its blocks, the first `num_shared_tokens` are not its own."""
        return NewSequence(
            sequence_id=self.sequence_id,
            token_ids=tuple(self.token_ids),
            num_output_tokens=self.num_output_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_shared_tokens=num_shared_tokens,
            block_tables=block_tables,
            sampling=self.request.sampling,
            seed=self.seed,
            eos_token_ids=self.eos_token_ids,
            next_prompt_logprob=self.next_prompt_logprob,
        )

    def output(
        self,
        token_ids: tuple[int, ...],
        *,
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> SequenceOutput:
        """What its client is told of a step; the end, once it has one, included."""
        return SequenceOutput(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=error,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _extend_hashes(self) -> None:
        if self.hash_chain is not None:
            self.hash_chain.extend(self.block_hashes, self.token_ids, self.block_size)


def samples_of(
    request: Request,
    *,
    arrival: int,
    seed: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    hash_chain: HashChain | None,
    block_size: int,
) -> list[Sequence]:
    """A validated request's samples that have not ended, each with a seed of its own.

    The later ones share the first one's prompt, unless they have gone on from it elsewhere.
    """
    room = max_model_len - len(request.prompt_token_ids)
    max_tokens = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
    samples: list[Sequence] = []
    for index in request.live_samples:
        is_new = not request.progress_of(index).token_ids
        parent = samples[0] if samples and is_new and not samples[0].num_output_tokens else None
        samples.append(
            Sequence(
                request,
                index,
                arrival=arrival,
                seed=(seed + index * _SEED_STRIDE) & _SEED_MASK,
                max_tokens=max_tokens,
                eos_token_ids=eos_token_ids,
                hash_chain=hash_chain,
                block_size=block_size,
                parent=parent,
            )
        )
    return samples
