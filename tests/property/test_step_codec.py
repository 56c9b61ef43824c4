"""Plans that went to another rank as bytes are the plans that were made, in any order of events."""

from dataclasses import fields, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pagoda.worker.step_codec import StepDecoder, StepEncoder
from pagoda.worker.types import MAX_SEED, NewSequence, SamplingParams, SchedulerOutput, SequenceId

SMALL = st.integers(0, 3)
COUNT = st.integers(0, 2**24)
ID32 = st.integers(0, 2**31 - 1)
SEQUENCE_ID = st.sampled_from([SequenceId(f"request-{number}/0") for number in range(6)] + [SequenceId("\ud800/1")])
SEED = st.integers(0, MAX_SEED)
PENALTY = st.floats(-2, 2)
TEXT = st.text(st.characters(), max_size=4)
"""Lone surrogates among them."""

SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 1000),
    "top_k": st.integers(-1, 2**63 - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False),
    "logit_bias": st.dictionaries(ID32, st.floats(-100, 100), max_size=3),
    "seed": st.none() | SEED,
    "n": st.integers(1, 128),
    "max_tokens": st.none() | st.integers(1, 2**24),
    "min_tokens": COUNT,
    "stop": st.lists(TEXT, max_size=3).map(tuple),
    "stop_token_ids": st.lists(ID32, max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
}
NEW: dict[str, st.SearchStrategy[Any]] = {
    "sequence_id": SEQUENCE_ID,
    "token_ids": st.lists(ID32, max_size=5).map(tuple),
    "num_output_tokens": COUNT,
    "num_computed_tokens": COUNT,
    "num_shared_tokens": COUNT,
    "block_tables": st.lists(st.lists(ID32, max_size=3).map(tuple), max_size=3).map(tuple),
    "sampling": st.builds(SamplingParams, **SAMPLING),
    "seed": SEED,
    "eos_token_ids": st.frozensets(ID32, max_size=3),
    "next_prompt_logprob": COUNT,
}
PLAN: dict[str, st.SearchStrategy[Any]] = {
    "step": st.integers(0, 2**63),
    "dropped": st.lists(SEQUENCE_ID, max_size=3),
    "new": st.lists(st.builds(NewSequence, **NEW), max_size=2),
    "block_updates": st.lists(st.tuples(SEQUENCE_ID, SMALL, COUNT, ID32), max_size=3),
    "block_copies": st.lists(st.tuples(ID32, ID32), max_size=3),
    "num_scheduled_tokens": st.dictionaries(SEQUENCE_ID, st.sampled_from([1, 1, 1, 700]), max_size=4),
}
STRATEGIES = {SamplingParams: SAMPLING, NewSequence: NEW, SchedulerOutput: PLAN}


@pytest.mark.parametrize("message", STRATEGIES, ids=lambda message: message.__name__)
def test_every_field_is_tried_out(message: type) -> None:
    """Whoever adds a field adds it here, and then finds out whether it arrives."""
    assert STRATEGIES[message].keys() == {field.name for field in fields(message)}


def assert_arrives(plan: SchedulerOutput, encoder: StepEncoder, decoder: StepDecoder) -> int:
    """Returns how many bytes it took."""
    data = encoder.encode(plan)
    arrived = decoder.decode(data)
    assert arrived == plan
    assert list(arrived.num_scheduled_tokens) == list(plan.num_scheduled_tokens)  # decodes come first
    return len(data)


@given(st.lists(st.builds(SchedulerOutput, **PLAN), max_size=12))
def test_any_plans_arrive(plans: list[SchedulerOutput]) -> None:
    """Whatever they say: sequences that are dropped and never were, come back, are dropped twice, or just stay."""
    encoder, decoder = StepEncoder(), StepDecoder()
    for plan in plans:
        assert_arrives(plan, encoder, decoder)
        assert_arrives(replace(plan, step=plan.step + 1), encoder, decoder)


def sequence(number: int, num_tokens: int = 40) -> NewSequence:
    sequence_id = SequenceId(f"cmpl-{number:032x}/0")
    sampling = SamplingParams(temperature=0.7, stop=("END",))
    return NewSequence(sequence_id, tuple(range(num_tokens)), 0, 0, 0, ((1, 2, 3),), sampling, 7, frozenset({2}), 40)


def test_preempted_sequence_comes_back_in_the_plan_that_drops_it() -> None:
    """And its number is not given to the one that starts beside it."""
    encoder, decoder = StepEncoder(), StepDecoder()
    first, second = sequence(1), sequence(2)
    assert_arrives(SchedulerOutput(1, new=[first]), encoder, decoder)
    both = SchedulerOutput(2, dropped=[first.sequence_id], new=[second, replace(first, num_output_tokens=9)])
    assert_arrives(both, encoder, decoder)
    scheduled = {first.sequence_id: 1, second.sequence_id: 1}
    assert_arrives(SchedulerOutput(3, num_scheduled_tokens=scheduled), encoder, decoder)


def test_numbers_are_given_out_again() -> None:
    """They stay small however many requests a worker has served."""
    encoder, decoder = StepEncoder(), StepDecoder()
    for step in range(1000):
        dropped = [] if step == 0 else [sequence(step - 1).sequence_id]
        assert_arrives(SchedulerOutput(step, dropped=dropped, new=[sequence(step)]), encoder, decoder)
    assert len(decoder._ids) == 2


def test_top_k_beyond_all_vocabularies() -> None:
    """The API sets it no bound; it must not end the ranks."""
    encoder, decoder = StepEncoder(), StepDecoder()
    plan = SchedulerOutput(1, new=[replace(sequence(1), sampling=SamplingParams(top_k=10**30))])
    assert decoder.decode(encoder.encode(plan)).new[0].sampling.top_k == 2**63 - 1


@pytest.mark.parametrize("num_sequences", [32, 64])
def test_steady_decode_says_almost_nothing(num_sequences: int) -> None:
    """At most 200 bytes a running request is what we promise; a step in which each gets a block is the worst there is,
    here with tables of a million tokens in a pool of 16 million blocks."""
    encoder, decoder = StepEncoder(), StepDecoder()
    ids = [sequence(number).sequence_id for number in range(num_sequences)]
    prompts = SchedulerOutput(1, new=[sequence(number) for number in range(num_sequences)])
    prompts.num_scheduled_tokens = dict.fromkeys(ids, 40)
    assert_arrives(prompts, encoder, decoder)
    decode = SchedulerOutput(2, num_scheduled_tokens=dict.fromkeys(ids, 1))
    assert_arrives(decode, encoder, decoder)
    assert assert_arrives(replace(decode, step=10**9), encoder, decoder) <= 10
    updates = [(sequence_id, 0, 65_000, 2**24 - 1) for sequence_id in ids]
    assert assert_arrives(replace(decode, step=10**9, block_updates=updates), encoder, decoder) <= 10 * num_sequences
    one_less = SchedulerOutput(10**9, dropped=ids[:1], num_scheduled_tokens=dict.fromkeys(ids[1:], 1))
    assert assert_arrives(one_less, encoder, decoder) <= 2 * num_sequences + 20


@pytest.mark.parametrize("lost", [0, 1])
def test_plan_that_was_lost_is_noticed_or_harmless(lost: int) -> None:
    """A rank that has missed a sequence's name cannot take it for another's."""
    encoder, decoder = StepEncoder(), StepDecoder()
    data = [encoder.encode(SchedulerOutput(step, new=[sequence(step)])) for step in range(2)]
    data.append(encoder.encode(SchedulerOutput(2, num_scheduled_tokens={sequence(lost).sequence_id: 1})))
    decoder.decode(data[1 - lost])
    with pytest.raises(KeyError):
        decoder.decode(data[2])


def test_garbage_is_an_error() -> None:
    with pytest.raises(Exception, match="parsing"):
        StepDecoder().decode(b"\xff\xff\xff")
