"""Words that the tests of the scheduler share."""

from fakes import generate

from pagoda.worker.types import SamplingParams, SchedulerOutput


def started(plan: SchedulerOutput) -> list[str]:
    return [new.sequence_id for new in plan.new]


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    """Tokens of which no two are alike, nor like those of a prompt with another `first` far enough away."""
    return list(range(first, first + num_tokens))


def greedy(tokens: list[int], num_tokens: int, vocab_size: int = 64) -> list[int]:
    """What a greedy request gets."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return generate(tokens, sampling, 0, max_model_len=10_000, vocab_size=vocab_size)[0]
