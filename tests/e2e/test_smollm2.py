"""The real model, SmolLM2-135M, in float32: the same tokens as transformers, however it is served."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from oracle import NUM_THREADS, Comparisons, Generation, Oracle, Prompt, Serving
from prompts import long_text, token_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagoda.worker.config import CacheConfig, SchedulerConfig
from pagoda.worker.types import FinishReason, SamplingParams

P = 16
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
NUM_BLOCKS = 400
"""More than all prompts and outputs take."""
SMALL_POOL = 16
"""Blocks: room for five short prompts, but not for what they grow to."""


class Model:
    """The model on disk, its tokenizer's prompts, its oracle."""

    def __init__(self, folder: Path, comparisons: Comparisons) -> None:
        torch.set_num_threads(NUM_THREADS)
        self.folder = folder
        self.oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), comparisons)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = token_prompts(self.tokenizer)
        self.short = [prompt for prompt in self.prompts if len(prompt) < 100]

    def serve(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        enable_prefix_caching: bool = False,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1024,
    ) -> Serving:
        return Serving(
            self.folder,
            cache=CacheConfig(block_size=P, num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        )

    def check(self, prompts: Sequence[Prompt], results: Sequence[list[Generation]]) -> None:
        self.oracle.check_all(prompts, results, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model(smollm2: Path, comparisons: Comparisons) -> Model:
    return Model(smollm2, comparisons)


# -- greedy ----------------------------------------------------------------------------------------


def test_alone(model: Model) -> None:
    """One request at a time."""
    assert len(model.prompts) >= 20
    with model.serve() as serving:
        results = [serving.generate([prompt], GREEDY)[0] for prompt in model.prompts]
    model.check(model.prompts, results)


def test_equals_generate(model: Model) -> None:
    """Against transformers' own loop: a chat that comes to an end, and texts that do not."""
    prompts = [model.prompts[index] for index in (2, 8, 15)]
    with model.serve() as serving:
        results = serving.generate(prompts, GREEDY)
    for prompt, (generation,) in zip(prompts, results, strict=True):
        model.oracle.check_against_generate(prompt, generation, max_tokens=MAX_TOKENS)
    assert {generation.finish_reason for (generation,) in results} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("enable_prefix_caching", [False, True], ids=["cache off", "cache on"])
def test_mixed_batches_of_tiny_chunks(model: Model, enable_prefix_caching: bool) -> None:
    """24 tokens a step, so that chunks begin and end anywhere beside decodes; then all again.

    With the cache on, all whole blocks of a prompt are found the second time, but for its last token.
    """
    with model.serve(enable_prefix_caching=enable_prefix_caching, max_num_seqs=8, max_num_batched_tokens=24) as serving:
        model.check(model.prompts, serving.generate(model.prompts, GREEDY))
        if enable_prefix_caching:
            again = serving.generate(model.prompts, GREEDY)
            model.check(model.prompts, again)
            found = [generation.num_cached_tokens for (generation,) in again]
            assert found == [min(len(prompt) // P * P, len(prompt) - 1) for prompt in model.prompts]
            assert sum(found) > 2000


@pytest.mark.parametrize("enable_prefix_caching", [False, True], ids=["cache off", "cache on"])
def test_preempted(model: Model, enable_prefix_caching: bool) -> None:
    """A pool that is always full: sequences lose their blocks half-way and compute them again."""
    prompts = model.short[2:14]
    with model.serve(
        num_blocks=SMALL_POOL, enable_prefix_caching=enable_prefix_caching, max_num_seqs=8, max_num_batched_tokens=40
    ) as serving:
        results = serving.generate(prompts, GREEDY)
        assert serving.stats.num_preemptions > 0
    model.check(prompts, results)


def test_a_sequence_may_fill_the_pool_to_the_last_slot(model: Model) -> None:
    """Four blocks are the longest context: the answer ends where the pool does."""
    prompt = model.prompts[8]
    with model.serve(num_blocks=4) as serving:
        ((generation,),) = serving.generate([prompt], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    model.oracle.check(prompt, generation, max_tokens=4 * P - len(prompt), ignore_eos=True)


# -- samples ---------------------------------------------------------------------------------------


def test_greedy_samples_are_all_the_same(model: Model) -> None:
    """n = 4: the samples share the prompt's blocks and copy its open one."""
    prompts = model.short[:8]
    with model.serve() as serving:
        results = serving.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, n=4))
    model.check(prompts, results)
    assert all(len({generation.token_ids for generation in samples}) == 1 for samples in results)


def test_seeded_samples_are_the_same_alone_batched_and_preempted(model: Model) -> None:
    """n = 4 at temperature 1: what is drawn depends on seed and position only.

    A draw that falls within a rounding of the boundary between two tokens could differ; that is 1e-6 of all draws.
    """
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=1234, n=4, max_tokens=MAX_TOKENS)
    prompts = model.short[2:5]
    with model.serve(enable_prefix_caching=True) as serving:
        alone = [tokens_of(serving.generate([prompt], sampling)[0]) for prompt in prompts]
        batched = [tokens_of(samples) for samples in serving.generate(prompts, sampling)]
    assert batched == alone
    with model.serve(num_blocks=SMALL_POOL) as serving:
        preempted = [tokens_of(samples) for samples in serving.generate(prompts, sampling)]
        assert serving.stats.num_preemptions > 0
    assert preempted == alone
    assert all(len(set(samples)) > 1 for samples in alone)


def tokens_of(samples: list[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in samples]


# -- shared prefix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 128])
def test_simultaneous_requests_compute_a_shared_prefix_once(model: Model, max_num_batched_tokens: int) -> None:
    """64 requests with 500 tokens in common, of which 31 blocks are whole, and a question of their own.

    The first computes all its tokens, each other one what follows those blocks, and each all but the last of its
    output: not a token more, also where the first takes four steps for its prompt.
    """
    max_tokens = 3
    prefix = tuple(model.tokenizer.encode(long_text(7))[:500])
    questions = [tuple(model.tokenizer.encode(f"\nQ{number}: who came?\nA:")) for number in range(4)]
    prompts = [prefix + question for question in questions] * 16
    assert max(len(prompt) for prompt in prompts) < 512
    with model.serve(enable_prefix_caching=True, max_num_batched_tokens=max_num_batched_tokens) as serving:
        results = serving.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        num_computed = serving.stats.num_computed_tokens
    model.oracle.check_all(prompts, results, max_tokens=max_tokens)
    num_outputs = sum(len(generation.token_ids) for (generation,) in results)
    assert num_computed == 496 + sum(len(prompt) - 496 for prompt in prompts) + num_outputs - len(prompts)
