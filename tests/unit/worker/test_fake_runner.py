"""A fake model: answers as repeatable as a real one's, and times that follow from what is computed."""

import time
from dataclasses import replace

import pytest

from pagoda.worker.fake_runner import FakeRunner
from pagoda.worker.types import NewSequence, SamplingParams, SchedulerOutput, SequenceId, TokenLogprobs

PROMPT = tuple(range(300, 340))
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1)


def sequence(
    number: int = 0, tokens: tuple[int, ...] = PROMPT, *, seed: int = 1, sampling: SamplingParams = GREEDY
) -> NewSequence:
    return NewSequence(SequenceId(str(number)), tokens, 0, 0, 0, ((),), sampling, seed, frozenset(), len(tokens))


def decode(runner: FakeRunner, new: NewSequence, count: int) -> list[int]:
    """Prefill in two chunks, then `count - 1` decodes."""
    name, half = new.sequence_id, len(new.token_ids) // 2
    assert not runner.execute(SchedulerOutput(0, new=[new], num_scheduled_tokens={name: half})).sampled
    outputs = [runner.execute(SchedulerOutput(1, num_scheduled_tokens={name: len(new.token_ids) - half}))]
    outputs += [runner.execute(SchedulerOutput(2, num_scheduled_tokens={name: 1})) for _ in range(count - 1)]
    return [output.sampled[name] for output in outputs]


def runner() -> FakeRunner:
    return FakeRunner(step_s=0.0, vocab_size=10_000)


def test_greedy_answers_follow_from_the_prompt() -> None:
    tokens = decode(runner(), sequence(), 20)
    assert tokens == decode(runner(), sequence(seed=2), 20)
    assert len(set(tokens)) > 10
    assert all(256 <= token < 10_000 for token in tokens)
    assert tokens != decode(runner(), sequence(tokens=(301, *PROMPT[1:])), 20)


def test_sampled_answers_follow_from_the_seed_too() -> None:
    one, same, other = (decode(runner(), sequence(seed=seed, sampling=SAMPLED), 20) for seed in (5, 5, 6))
    assert one == same
    assert one != other
    assert one != decode(runner(), sequence(), 20)


def test_answers_are_the_same_after_preemption_and_beside_others() -> None:
    """Scenario: a request is preempted, or its worker dies, and goes on with prompt and output as its tokens."""
    whole = decode(runner(), sequence(), 20)
    busy = runner()
    decode(busy, sequence(7, PROMPT[:10]), 3)
    first = decode(busy, sequence(), 8)
    busy.execute(SchedulerOutput(3, dropped=[SequenceId("0")]))
    back = replace(sequence(), token_ids=PROMPT + tuple(first), num_output_tokens=8)
    assert first + decode(busy, back, 12) == whole


def test_log_probabilities_are_as_repeatable_and_each_told_once() -> None:
    """Of the output, and of the prompt from the second token on, whether it is computed in one piece or goes on."""
    asked = replace(SAMPLED, logprobs=3, prompt_logprobs=2)

    def tell(*chunks: int, next_prompt_logprob: int = 1) -> tuple[list[TokenLogprobs], TokenLogprobs]:
        one, name = runner(), SequenceId("0")
        new = [replace(sequence(sampling=asked), next_prompt_logprob=next_prompt_logprob)]
        steps = [
            one.execute(SchedulerOutput(step, new=new if step == 0 else [], num_scheduled_tokens={name: chunk}))
            for step, chunk in enumerate(chunks)
        ]
        assert not any(step.logprobs for step in steps[:-1])
        return [entry for step in steps for entry in step.prompt_logprobs.get(name, ())], steps[-1].logprobs[name]

    of_prompt, of_output = tell(len(PROMPT))
    assert [entry.token_id for entry in of_prompt] == list(PROMPT[1:])
    assert {len(entry.top) for entry in of_prompt} == {2}
    assert of_output.top[0] == (of_output.token_id, of_output.logprob)
    assert len({token_id for token_id, _ in of_output.top}) == 3
    assert tell(7, 20, len(PROMPT) - 27) == (of_prompt, of_output)
    assert tell(7, len(PROMPT) - 7, next_prompt_logprob=12) == (of_prompt[11:], of_output)


def test_steps_take_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    decode(FakeRunner(step_s=0.5, token_s=0.1, vocab_size=300), sequence(), 2)
    assert slept == pytest.approx([2.5, 2.5, 0.6])
