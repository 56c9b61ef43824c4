"""Every architecture, from tiny random checkpoints: greedy output is transformers', however it is served."""

import random
from pathlib import Path

import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from oracle import Comparisons, Generation, Oracle, Prompt, Serving

from pagoda.worker.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.types import FinishReason, SamplingParams

P = 4
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
TO_THE_LIMIT = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
NUM_BLOCKS = 1024
"""More than all prompts and outputs take."""


def random_prompts() -> list[Prompt]:
    """Lengths around a block, odd and long; the last two share 33 tokens, and one is a prefix of the other."""
    drawn = random.Random(0)
    tokens = [drawn.randrange(4, 96) for _ in range(200)]
    prompts = [tuple(tokens[offset : offset + n]) for offset, n in ((0, 1), (9, P - 1), (20, P), (30, P + 1), (50, 17))]
    return [*prompts, tuple(tokens[100:133]), tuple(tokens[100:160])]


PROMPTS = random_prompts()
ENDING = PROMPTS[4]
"""What every checkpoint answers with an end of sequence."""


class Checkpoint:
    """A checkpoint on disk, with its oracle."""

    def __init__(self, name: str, folder: Path, comparisons: Comparisons) -> None:
        self.folder = folder
        self.oracle = Oracle(make_checkpoint(name, folder, ending=ENDING), comparisons)
        config = EngineConfig(folder, cache=CacheConfig(block_size=P, num_blocks=NUM_BLOCKS))
        self.spec = plan_engine(config).spec

    def serve(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        enable_prefix_caching: bool = False,
        max_num_batched_tokens: int = 1024,
        tensor_parallel_size: int = 1,
    ) -> Serving:
        return Serving(
            self.folder,
            tensor_parallel_size=tensor_parallel_size,
            cache=CacheConfig(block_size=P, num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens),
        )

    def check(self, results: list[list[Generation]], *, ignore_eos: bool = False) -> None:
        self.oracle.check_all(PROMPTS, results, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, comparisons: Comparisons
) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"), comparisons)


def test_alone(checkpoint: Checkpoint) -> None:
    """One request at a time. Also that the oracle is worth asking: outputs are of many tokens."""
    with checkpoint.serve() as serving:
        results = [serving.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    checkpoint.check(results)
    assert len({token for (generation,) in results for token in generation.token_ids}) > 20


def test_equals_generate(checkpoint: Checkpoint) -> None:
    """Against transformers' own loop, which knows nothing of ours: an answer that ends, and another."""
    prompts = [ENDING, PROMPTS[-2]]
    with checkpoint.serve() as serving:
        results = serving.generate(prompts, GREEDY)
    assert results[0][0].finish_reason is FinishReason.STOP
    for prompt, (generation,) in zip(prompts, results, strict=True):
        checkpoint.oracle.check_against_generate(prompt, generation, max_tokens=MAX_TOKENS)


def test_batched(checkpoint: Checkpoint) -> None:
    with checkpoint.serve() as serving:
        checkpoint.check(serving.generate(PROMPTS, GREEDY))


def test_chunked(checkpoint: Checkpoint) -> None:
    """Five tokens a step: prompts come in up to 20 chunks, which begin and end anywhere in a block."""
    with checkpoint.serve(max_num_batched_tokens=5) as serving:
        checkpoint.check(serving.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 5])
def test_cached(checkpoint: Checkpoint, max_num_batched_tokens: int) -> None:
    """The second time every whole block of a prompt is found, but for its last token, which gives the logits."""
    with checkpoint.serve(enable_prefix_caching=True, max_num_batched_tokens=max_num_batched_tokens) as serving:
        checkpoint.check(serving.generate(PROMPTS, GREEDY))
        again = serving.generate(PROMPTS, GREEDY)
    checkpoint.check(again)
    found = [generation.num_cached_tokens for (generation,) in again]
    assert found == [min(len(prompt) // P * P, len(prompt) - 1) for prompt in PROMPTS]


@pytest.mark.parametrize("enable_prefix_caching", [False, True], ids=["cache off", "cache on"])
def test_preempted(checkpoint: Checkpoint, enable_prefix_caching: bool) -> None:
    """The pool holds little more than the longest sequence: others lose their blocks half-way and start again."""
    spec, step = checkpoint.spec, 8
    num_blocks = spec.num_blocks_for(len(PROMPTS[-1]) + MAX_TOKENS, max_step_tokens=step) + 4 * len(spec.groups)
    with checkpoint.serve(
        num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=step
    ) as serving:
        results = serving.generate(PROMPTS, TO_THE_LIMIT)
        assert serving.stats.num_preemptions > 0
    checkpoint.check(results, ignore_eos=True)


def test_a_sequence_may_fill_the_pool_to_the_last_slot(checkpoint: Checkpoint) -> None:
    """Two that want the whole pool, without a limit of their own: both get it, as one is preempted, and end there.

    With windows the second one waits: then the first one asks at once for as much as its windows ever hold. Where all
    layers have windows both go on to the model's longest context.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompts, spec, step = PROMPTS[-3:-1], checkpoint.spec, 8
    num_blocks = spec.num_blocks_for(80, max_step_tokens=step)
    longest = min(256, spec.num_tokens_in(num_blocks, max_step_tokens=step))
    with checkpoint.serve(num_blocks=num_blocks, max_num_batched_tokens=step) as serving:
        results = serving.generate(prompts, sampling)
        assert serving.stats.num_preemptions > 0 or any(spec.windows)
    for prompt, (generation,) in zip(prompts, results, strict=True):
        assert generation.finish_reason is FinishReason.LENGTH
        checkpoint.oracle.check(prompt, generation, max_tokens=longest - len(prompt), ignore_eos=True)


def test_samples_of_one_prompt(checkpoint: Checkpoint) -> None:
    """Three greedy samples share the prompt's blocks, copy the open one, and agree."""
    with checkpoint.serve() as serving:
        results = serving.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, n=3))
    checkpoint.check(results)
    assert all(len(samples) == 3 for samples in results)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_everything_at_once(checkpoint: Checkpoint, tensor_parallel_size: int) -> None:
    """On one rank and on two, processes that meet by gloo: chunks, hits and preemption, and the logits of prompts."""
    spec, step = checkpoint.spec, 8
    num_blocks = spec.num_blocks_for(len(PROMPTS[-1]) + MAX_TOKENS, max_step_tokens=step) + 4 * len(spec.groups)
    with checkpoint.serve(
        num_blocks=num_blocks,
        enable_prefix_caching=True,
        max_num_batched_tokens=step,
        tensor_parallel_size=tensor_parallel_size,
    ) as serving:
        checkpoint.check(serving.generate(PROMPTS, TO_THE_LIMIT), ignore_eos=True)
        assert serving.stats.num_preemptions > 0
        _, again = (serving.generate(PROMPTS[-1:], GREEDY) for _ in range(2))
        assert again[0][0].num_cached_tokens == len(PROMPTS[-1]) - 1
        told = serving.generate(PROMPTS[3:], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    checkpoint.oracle.check_all(PROMPTS[-1:], again, max_tokens=MAX_TOKENS)
    for prompt, (generation,) in zip(PROMPTS[3:], told, strict=True):
        checkpoint.oracle.check_prompt_logprobs(prompt, generation)
