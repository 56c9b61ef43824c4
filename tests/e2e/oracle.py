"""Our engine and transformers side by side: whether greedy output is what transformers computes, in float32.

Equal means identical, but for near-ties: where transformers' own logits of two tokens are closer than `NEAR_TIE`, the
order in which floats are summed decides between them, and either is right. Near-ties are counted.

Dimensions: T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch

from pagoda.worker.build import build_engine
from pagoda.worker.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.types import FinishReason, Request, RequestId, SamplingParams, SequenceOutput

NEAR_TIE = 1e-4
"""Logits are of size 10 to 30, in float32 after some hundred roundings of 6e-8 of their size each."""
NUM_THREADS = 2
PATIENCE_S = 300
"""Without any output for so long, the engine hangs."""

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Generation:
    """All that one sample got."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens from the second on, if they were asked for."""


class Serving:
    """An engine on a model folder. The requests of the first call are all there when it takes its first step."""

    def __init__(
        self,
        folder: Path,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        config = EngineConfig(
            folder,
            dtype="float32",
            device="cpu",
            num_threads=1 if tensor_parallel_size > 1 else NUM_THREADS,
            tensor_parallel_size=tensor_parallel_size,
            cache=cache,
            scheduler=scheduler or SchedulerConfig(),
        )
        self._outputs: SimpleQueue[list[SequenceOutput]] = SimpleQueue()
        self._engine = build_engine(config, on_outputs=self._outputs.put, progress=lambda *_: None)
        torch.set_num_threads(NUM_THREADS)  # for the oracle
        self._is_started = False
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._engine.shutdown()
        if error is None:
            assert self._engine.failure is None

    @property
    def stats(self) -> SchedulerStats:
        return self._engine.stats()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Generation]]:
        """Serve these prompts at the same time. Returns the samples of each."""
        requests = [Request(self._next_id(), prompt, sampling) for prompt in prompts]
        for request in requests:
            self._engine.add(request)
        if not self._is_started:
            self._engine.start()
            self._is_started = True
        results = {request.request_id: [Generation() for _ in range(sampling.n)] for request in requests}
        num_open = len(requests) * sampling.n
        while num_open:
            for output in self._next_outputs():
                assert output.error is None
                generation = results[output.request_id][output.index]
                assert generation.finish_reason is None, "something came after the end"
                generation.token_ids += output.token_ids
                generation.finish_reason = output.finish_reason
                generation.num_cached_tokens = output.num_cached_tokens
                generation.prompt_logprobs += tuple(entry.logprob for entry in output.prompt_logprobs)
                num_open -= output.finish_reason is not None
        return list(results.values())

    def _next_id(self) -> RequestId:
        self._num_requests += 1
        return RequestId(str(self._num_requests))

    def _next_outputs(self) -> list[SequenceOutput]:
        try:
            return self._outputs.get(timeout=PATIENCE_S)
        except Empty:
            raise AssertionError(f"the engine is silent; it died of {self._engine.failure}") from None


@dataclass(slots=True)
class Comparisons:
    """What was compared with transformers, for the summary."""

    num_tokens: int = 0
    near_ties: list[str] = field(default_factory=list)


class Oracle:
    """What transformers says of our tokens. An answer is remembered, so comparing the same output again is free."""

    def __init__(self, model: Any, comparisons: Comparisons) -> None:
        """`model` is a float32 transformers model; its generation config says what ends a sequence."""
        self._model = model.eval()
        self._comparisons = comparisons
        self._checked: set[tuple[Prompt, tuple[int, ...]]] = set()
        ends = model.generation_config.eos_token_id
        self.eos_token_ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def check(self, prompt: Prompt, generation: Generation, *, max_tokens: int, ignore_eos: bool = False) -> None:
        """Assert that `generation` is greedy and ends where it must.

        Our own tokens are put through the model at once. That each is the argmax of what precedes it is the same as
        being what `generate` gives, and after a near-tie it still judges the rest.
        """
        assert_end(generation, max_tokens=max_tokens, eos_token_ids=set() if ignore_eos else self.eos_token_ids)
        key = (prompt, generation.token_ids)
        if key in self._checked:
            return
        gaps_T = self._gaps(prompt, generation.token_ids)
        worst = int(gaps_T.argmax())
        assert gaps_T[worst] < NEAR_TIE, (
            f"of prompt {prompt[:8]}... output {worst}, token {generation.token_ids[worst]}, "
            f"is {gaps_T[worst]:.2e} below transformers' choice; all: {generation.token_ids}"
        )
        self._checked.add(key)
        self._comparisons.num_tokens += len(gaps_T)
        self._comparisons.near_ties += [f"{gap:.1e}" for gap in gaps_T.tolist() if gap > 0]

    def check_all(
        self,
        prompts: Sequence[Prompt],
        results: Sequence[list[Generation]],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
    ) -> None:
        """`check` for every sample of every prompt."""
        for prompt, samples in zip(prompts, results, strict=True):
            for generation in samples:
                self.check(prompt, generation, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def check_against_generate(self, prompt: Prompt, generation: Generation, *, max_tokens: int) -> None:
        """Assert that transformers' own `generate` gives these tokens, its end included."""
        self.check(prompt, generation, max_tokens=max_tokens)
        input_ids = torch.tensor([prompt])
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        expected = tuple(output[0, len(prompt) :].tolist())
        if generation.token_ids != expected:
            pairs = enumerate(zip(generation.token_ids, expected, strict=False))
            first = next(index for index, (ours, theirs) in pairs if ours != theirs)
            assert self._gaps(prompt, generation.token_ids)[first] > 0, "they differ without a near-tie"

    def check_prompt_logprobs(self, prompt: Prompt, generation: Generation) -> None:
        """Assert that the prompt's log probabilities, which are those of its logits, are transformers'."""
        token_ids = torch.tensor(prompt)
        with torch.inference_mode():
            logprobs_TV = self._model(token_ids[None]).logits[0].log_softmax(-1)
        expected = logprobs_TV[:-1].gather(-1, token_ids[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.prompt_logprobs), expected, rtol=0, atol=NEAR_TIE)

    def _gaps(self, prompt: Prompt, token_ids: tuple[int, ...]) -> torch.Tensor:
        """How far below the best logit each token's is: 0 where it is the best."""
        input_ids = torch.tensor([[*prompt, *token_ids[:-1]]])
        with torch.inference_mode():
            logits_TV = self._model(input_ids, logits_to_keep=len(token_ids)).logits[0]
        chosen_T = logits_TV.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        gaps_T: torch.Tensor = logits_TV.amax(-1) - chosen_T
        return gaps_T


def assert_end(generation: Generation, *, max_tokens: int, eos_token_ids: set[int]) -> None:
    """The first end-of-sequence token ends a generation and is its last token; else it has `max_tokens`."""
    *before, last = generation.token_ids
    assert not eos_token_ids.intersection(before)
    if last in eos_token_ids:
        assert generation.finish_reason is FinishReason.STOP
    else:
        assert (generation.finish_reason, len(generation.token_ids)) == (FinishReason.LENGTH, max_tokens)
