"""An engine on a tiny model: log probabilities are transformers', and a seed fixes the tokens however it is run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model
from transformers import LlamaForCausalLM

from pagoda.worker.build import build_engine
from pagoda.worker.config import CacheConfig, Dtype, EngineConfig, SchedulerConfig
from pagoda.worker.engine import Engine
from pagoda.worker.types import Request, RequestId, SamplingParams, SequenceOutput, TokenLogprobs

P = 4
TOLERANCE = 1e-4
"""Logits of size 1 in float32; the two implementations sum in another order."""
PATIENCE_S = 60
PROMPTS = [tuple((7 * start + 3 * i) % 250 + 3 for i in range(length)) for start, length in enumerate((1, 3, 4, 5, 37))]


@dataclass(slots=True)
class Serving:
    """An engine and what comes out of it."""

    engine: Engine
    outputs: SimpleQueue[list[SequenceOutput]]
    num_requests: int = 0

    def run(self, prompts: Sequence[tuple[int, ...]], settings: Sequence[SamplingParams]) -> list[list[SequenceOutput]]:
        """All at the same time. Returns the merged output of each sample of each."""
        ids = []
        for prompt, sampling in zip(prompts, settings, strict=True):
            self.num_requests += 1
            ids.append(RequestId(str(self.num_requests)))
            self.engine.add(Request(ids[-1], prompt, sampling))
        merged: dict[tuple[RequestId, int], SequenceOutput] = {}
        num_open = sum(sampling.n for sampling in settings)
        while num_open:
            for output in self.outputs.get(timeout=PATIENCE_S):
                assert output.error is None
                key = (output.request_id, output.index)
                merged[key] = merged[key].merged_with(output) if key in merged else output
                num_open -= output.finish_reason is not None
        return [
            [merged[request_id, index] for index in range(s.n)] for request_id, s in zip(ids, settings, strict=True)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def serve(
    folder: Path, *, num_blocks: int = 256, max_num_batched_tokens: int = 1024, dtype: Dtype = "float32"
) -> Iterator[Serving]:
    outputs: SimpleQueue[list[SequenceOutput]] = SimpleQueue()
    config = EngineConfig(
        folder,
        dtype=dtype,
        device="cpu",
        num_threads=1,
        cache=CacheConfig(block_size=P, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=max_num_batched_tokens),
    )
    engine = build_engine(config, on_outputs=outputs.put, progress=lambda *_: None)
    engine.start()
    try:
        yield Serving(engine, outputs)
    finally:
        engine.shutdown()
    assert engine.failure is None


def check_against_reference(
    reference: Any, entries: Sequence[TokenLogprobs], token_ids: Sequence[int], first: int, num_top: int
) -> None:
    """`entries` are of `token_ids` from `first` on."""
    assert [entry.token_id for entry in entries] == list(token_ids[first:])
    if not entries:
        return
    with torch.inference_mode():
        logprobs_TV = reference(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    for position, entry in enumerate(entries, start=first):
        logprobs_V = logprobs_TV[position - 1]
        assert entry.logprob == pytest.approx(logprobs_V[entry.token_id].item(), abs=TOLERANCE)
        best = logprobs_V.topk(num_top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        for token_id, value in entry.top:
            assert value == pytest.approx(logprobs_V[token_id].item(), abs=TOLERANCE)
        slack = TOLERANCE * torch.tensor([1, -1])
        least, most = ((logprobs_V > logprobs_V[entry.token_id] + s).sum().item() + 1 for s in slack)
        assert least <= entry.rank <= most


def check_all(reference: Any, results: Sequence[Sequence[SequenceOutput]], *, num_top: int) -> None:
    for prompt, samples in zip(PROMPTS, results, strict=True):
        for index, output in enumerate(samples):
            check_against_reference(reference, output.logprobs, prompt + output.token_ids, len(prompt), num_top)
            if index == 0:
                check_against_reference(reference, output.prompt_logprobs, prompt, 1, num_top)
            else:
                assert output.prompt_logprobs == ()


BOTH = SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=5, prompt_logprobs=5)


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_logprobs_are_those_of_transformers(folder: Path, reference: Any, max_num_batched_tokens: int, n: int) -> None:
    """Of prompts and outputs, in one batch, with prompts whole and in chunks of five; asked for twice."""
    with serve(folder, max_num_batched_tokens=max_num_batched_tokens) as serving:
        for _ in range(2):
            results = serving.run(PROMPTS, [replace(BOTH, n=n)] * len(PROMPTS))
            check_all(reference, results, num_top=5)


def test_logprobs_after_preemption(folder: Path, reference: Any) -> None:
    """The pool holds two and a half of them at once, so all but the first are computed again."""
    sampling = replace(BOTH, max_tokens=40, ignore_eos=True)
    with serve(folder, num_blocks=30, max_num_batched_tokens=7) as serving:
        results = serving.run(PROMPTS, [sampling] * len(PROMPTS))
        assert serving.engine.stats().num_preemptions > 0
    check_all(reference, results, num_top=5)


def test_logprobs_are_of_the_raw_logits(folder: Path, reference: Any) -> None:
    """Temperature, filters, penalties and bias choose other tokens, but tell of them what the model says."""
    sampling = replace(BOTH, temperature=2.0, top_k=50, repetition_penalty=3.0, logit_bias={9: 4.0}, min_tokens=8)
    with serve(folder) as serving:
        results = serving.run(PROMPTS, [sampling] * len(PROMPTS))
    check_all(reference, results, num_top=5)


def test_none_unless_asked(folder: Path) -> None:
    """Beside one that asks for logprobs, others get none; 0 means those of the tokens alone."""
    plain = replace(BOTH, logprobs=None, prompt_logprobs=None)
    settings = [plain, replace(plain, logprobs=0), replace(plain, prompt_logprobs=0)]
    with serve(folder) as serving:
        (none,), (own,), (prompt,) = serving.run([PROMPTS[4]] * 3, settings)
    assert (len(none.logprobs), len(none.prompt_logprobs)) == (0, 0)
    assert (len(own.logprobs), len(own.prompt_logprobs)) == (8, 0)
    assert (len(prompt.logprobs), len(prompt.prompt_logprobs)) == (0, 36)
    assert all(entry.top == () for entry in (*own.logprobs, *prompt.prompt_logprobs))


# -- seeds -----------------------------------------------------------------------------------------

SEEDED = [
    SamplingParams(seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=40, ignore_eos=True, temperature=1.5, top_p=0.9),
    SamplingParams(seed=3, max_tokens=40, ignore_eos=True, top_k=20, min_p=0.001, n=3),
    SamplingParams(seed=4, max_tokens=40, ignore_eos=True, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(seed=5, max_tokens=40, ignore_eos=True, repetition_penalty=1.5, logit_bias={50: 3.0}),
]


def tokens(results: Sequence[Sequence[SequenceOutput]]) -> list[list[tuple[int, ...]]]:
    return [[output.token_ids for output in samples] for samples in results]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Dtype:
    """What is rounded otherwise in a batch moves far more tokens in bfloat16."""
    found: Dtype = request.param
    return found


@pytest.fixture(scope="module")
def alone(folder: Path, dtype: Dtype) -> list[list[tuple[int, ...]]]:
    """What each gets when nothing runs beside it."""
    with serve(folder, dtype=dtype) as serving:
        return [tokens(serving.run([p], [s]))[0] for p, s in zip(PROMPTS, SEEDED, strict=True)]


def test_seeded_samples_differ_from_each_other(alone: list[list[tuple[int, ...]]]) -> None:
    """Else the tests below would compare nothing."""
    drawn = [output for samples in alone for output in samples]
    assert len(set(drawn)) == 7
    assert all(len(set(output)) > 10 for output in drawn)


def test_seeded_alone_twice(folder: Path, dtype: Dtype, alone: list[list[tuple[int, ...]]]) -> None:
    """The second time the prompt comes from the cache."""
    with serve(folder, dtype=dtype) as serving:
        for _ in range(2):
            assert tokens(serving.run(PROMPTS[4:], SEEDED[4:])) == alone[4:]


@pytest.mark.parametrize("max_num_batched_tokens", [1024, 5])
def test_seeded_batched(
    folder: Path, dtype: Dtype, alone: list[list[tuple[int, ...]]], max_num_batched_tokens: int
) -> None:
    with serve(folder, dtype=dtype, max_num_batched_tokens=max_num_batched_tokens) as serving:
        assert tokens(serving.run(PROMPTS, SEEDED)) == alone


def test_seeded_preempted(folder: Path, dtype: Dtype, alone: list[list[tuple[int, ...]]]) -> None:
    """Penalties count the output from before the preemption, and draws go on where they were."""
    with serve(folder, dtype=dtype, num_blocks=30) as serving:
        assert tokens(serving.run(PROMPTS, SEEDED)) == alone
        assert serving.engine.stats().num_preemptions > 0


def test_logprobs_change_no_token(folder: Path, dtype: Dtype, alone: list[list[tuple[int, ...]]]) -> None:
    settings = [replace(sampling, logprobs=20, prompt_logprobs=20) for sampling in SEEDED]
    with serve(folder, dtype=dtype) as serving:
        assert tokens(serving.run(PROMPTS, settings)) == alone
