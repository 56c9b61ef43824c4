"""Plans replayed into the rank's rows, against a model of plain lists.

Dimensions: T tokens, B sequences, M block-table columns.
"""

import random
from dataclasses import dataclass, field

import pytest

from pagoda.worker.input_batch import InputBatch, StepInputs
from pagoda.worker.types import NewSequence, SamplingParams, SchedulerOutput, SequenceId

P = 4
MAX_MODEL_LEN = 30
MAX_NUM_SEQS = 5


def new_sequence(
    name: str,
    token_ids: list[int],
    blocks: list[int],
    *,
    num_output_tokens: int = 0,
    num_computed_tokens: int = 0,
    num_shared_tokens: int = 0,
    seed: int = 0,
    prompt_logprobs_from: int | None = None,
) -> NewSequence:
    return NewSequence(
        sequence_id=SequenceId(name),
        token_ids=tuple(token_ids),
        num_output_tokens=num_output_tokens,
        num_computed_tokens=num_computed_tokens,
        num_shared_tokens=num_shared_tokens,
        block_tables=(tuple(blocks),),
        sampling=SamplingParams(),
        seed=seed,
        eos_token_ids=frozenset({0}),
        next_prompt_logprob=(
            len(token_ids) - num_output_tokens if prompt_logprobs_from is None else prompt_logprobs_from
        ),
    )


def new_batch() -> InputBatch:
    return InputBatch(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=P)


def scheduled(**num_tokens: int) -> dict[SequenceId, int]:
    return {SequenceId(name): count for name, count in num_tokens.items()}


def names(inputs: StepInputs) -> list[str]:
    return [str(sequence_id) for sequence_id, _ in inputs.sampled]


# -- one plan at a time ----------------------------------------------------------------------------


def test_a_prompt_in_chunks_then_decoding() -> None:
    """Seven tokens in blocks 9 and 3, computed 5 + 2; the sampled token 70 is computed next, in a slot of block 3."""
    batch = new_batch()
    plan = SchedulerOutput(
        1, new=[new_sequence("a", [10, 11, 12, 13, 14, 15, 16], [9, 3])], num_scheduled_tokens=scheduled(a=5)
    )
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids_T.tolist() == [10, 11, 12, 13, 14]
    assert inputs.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert inputs.slot_mapping_GT[0].tolist() == [36, 37, 38, 39, 12]
    assert inputs.block_table_GBM[0].tolist() == [[9, 3]]
    assert (inputs.query_start_loc.tolist(), inputs.seq_lens_B.tolist(), inputs.num_decodes) == ([0, 5], [5], 0)
    assert (names(inputs), inputs.last_token_indices.tolist()) == ([], [])
    batch.finish(plan, {})

    plan = SchedulerOutput(2, num_scheduled_tokens=scheduled(a=2))
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids_T.tolist() == [15, 16]
    assert inputs.slot_mapping_GT[0].tolist() == [13, 14]
    assert (names(inputs), inputs.last_token_indices.tolist()) == (["a"], [1])
    batch.finish(plan, {SequenceId("a"): 70})

    plan = SchedulerOutput(3, num_scheduled_tokens=scheduled(a=1))
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids_T.tolist() == [70]
    assert (inputs.slot_mapping_GT[0].tolist(), inputs.seq_lens_B.tolist(), inputs.num_decodes) == ([15], [8], 1)
    assert inputs.sampled[0][1].num_output_tokens == 1


def test_shared_blocks_are_not_written() -> None:
    """Scenario: all 8 prompt tokens were found, the last is computed again for its logits: its slot is -1."""
    batch = new_batch()
    plan = SchedulerOutput(
        1,
        new=[new_sequence("a", list(range(8)), [5, 6], num_computed_tokens=7, num_shared_tokens=8)],
        num_scheduled_tokens=scheduled(a=1),
    )
    batch.apply(plan)
    inputs = batch.build(plan)
    assert (inputs.token_ids_T.tolist(), inputs.slot_mapping_GT[0].tolist()) == ([7], [-1])
    assert names(inputs) == ["a"]


def test_decodes_are_counted_up_to_the_first_longer_query() -> None:
    """A one-token chunk counts as a decode only if everything before it does, since decodes must lead."""
    batch = new_batch()
    plan = SchedulerOutput(
        1,
        new=[new_sequence(name, list(range(9)), [i, i + 5, i + 10]) for i, name in enumerate("abcd")],
        num_scheduled_tokens=scheduled(a=1, b=1, c=3, d=1),
    )
    batch.apply(plan)
    assert batch.build(plan).num_decodes == 2


def test_a_preempted_sequence_comes_back_with_its_output() -> None:
    """Output tokens of a sequence that returns stay output: they count for the draws and for min_tokens."""
    batch = new_batch()
    sequence = new_sequence("a", [1, 2, 3, 50, 51], [4, 2], num_output_tokens=2, seed=77)
    plan = SchedulerOutput(1, new=[sequence], num_scheduled_tokens=scheduled(a=5))
    batch.apply(plan)
    ((_, row),) = batch.build(plan).sampled
    assert (row.num_output_tokens, row.num_prompt_tokens, row.seed) == (2, 3, 77)


def test_an_id_that_ends_and_starts_again_in_one_plan() -> None:
    """Scenario: a request is aborted and its id used again before the next step: drops apply before additions."""
    batch = new_batch()
    first = SchedulerOutput(1, new=[new_sequence("a", [1, 2, 3], [0])], num_scheduled_tokens=scheduled(a=3))
    batch.apply(first)
    batch.finish(first, {SequenceId("a"): 4})
    again = SchedulerOutput(
        2,
        dropped=[SequenceId("a")],
        new=[new_sequence("a", [8, 9], [7])],
        num_scheduled_tokens=scheduled(a=2),
    )
    batch.apply(again)
    inputs = batch.build(again)
    assert (inputs.token_ids_T.tolist(), inputs.slot_mapping_GT[0].tolist()) == ([8, 9], [28, 29])


def test_changes_of_sequences_that_are_not_here_are_ignored() -> None:
    """Scenario: a step failed before this rank saw it, and the next plan drops and updates what it had brought."""
    batch = new_batch()
    batch.apply(SchedulerOutput(1, dropped=[SequenceId("gone")], block_updates=[(SequenceId("gone"), 0, 0, 3)]))
    plan = SchedulerOutput(2, new=[new_sequence("a", [1], [2])], num_scheduled_tokens=scheduled(a=1))
    batch.apply(plan)
    assert batch.build(plan).slot_mapping_GT[0].tolist() == [8]


def test_the_longest_context_fills_its_row() -> None:
    """The token sampled at `max_model_len` has no place in the row, and needs none: the sequence has ended."""
    batch = new_batch()
    table = list(range(-(-MAX_MODEL_LEN // P)))
    plan = SchedulerOutput(
        1, new=[new_sequence("a", list(range(MAX_MODEL_LEN)), table)], num_scheduled_tokens=scheduled(a=MAX_MODEL_LEN)
    )
    batch.apply(plan)
    assert batch.build(plan).token_ids_T.tolist() == list(range(MAX_MODEL_LEN))
    batch.finish(plan, {SequenceId("a"): 5})
    plan = SchedulerOutput(
        2, dropped=[SequenceId("a")], new=[new_sequence("b", [1, 2], [3])], num_scheduled_tokens=scheduled(b=2)
    )
    batch.apply(plan)
    assert batch.build(plan).token_ids_T.tolist() == [1, 2]


# -- random plans ----------------------------------------------------------------------------------


@dataclass
class ModelSequence:
    """What the model knows of a sequence."""

    token_ids: list[int]
    blocks: list[int]
    num_prompt_tokens: int
    num_computed: int
    num_shared: int


@dataclass
class PlainModel:
    """Draws plans and says, token by token, what their arrays must hold."""

    random: random.Random
    sequences: dict[SequenceId, ModelSequence] = field(default_factory=dict)
    num_steps: int = 0
    num_arrivals: int = 0

    def next_plan(self) -> SchedulerOutput:
        """A plan that drops, adds, replaces and appends blocks, and schedules some of what is here, decodes first."""
        self.num_steps += 1
        plan = SchedulerOutput(step=self.num_steps)
        for sequence_id in [s for s in self.sequences if self.random.random() < 0.1 or self._is_full(s)]:
            del self.sequences[sequence_id]
            plan.dropped.append(sequence_id)
        if len(self.sequences) < MAX_NUM_SEQS and self.random.random() < 0.6:
            plan.new.append(self._arrive())
        for sequence_id, sequence in self.sequences.items():
            if len(sequence.blocks) * P < len(sequence.token_ids):
                self._update(plan, sequence_id, len(sequence.blocks))
            elif self.random.random() < 0.1:
                self._update(plan, sequence_id, self.random.randrange(len(sequence.blocks)))
        chosen = [s for s in self.sequences if self.random.random() < 0.8]
        lens = {s: self._query_len(self.sequences[s]) for s in chosen}
        plan.num_scheduled_tokens = dict(sorted(lens.items(), key=lambda item: item[1] > 1))
        return plan

    def check(self, plan: SchedulerOutput, inputs: StepInputs) -> None:
        """Compare every array with what a walk over the tokens gives."""
        token_ids, positions, slots, starts, seq_lens, sampled, last = [], [], [], [0], [], [], []
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self.sequences[sequence_id]
            for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
                token_ids.append(sequence.token_ids[position])
                positions.append(position)
                is_shared = position < sequence.num_shared
                slots.append(-1 if is_shared else sequence.blocks[position // P] * P + position % P)
            starts.append(len(token_ids))
            seq_lens.append(sequence.num_computed + num_tokens)
            if seq_lens[-1] == len(sequence.token_ids):
                sampled.append((sequence_id, len(sequence.token_ids) - sequence.num_prompt_tokens))
                last.append(len(token_ids) - 1)
        assert inputs.token_ids_T.tolist() == token_ids
        assert inputs.positions_T.tolist() == positions
        assert inputs.slot_mapping_GT[0].tolist() == slots
        assert inputs.query_start_loc.tolist() == starts
        assert inputs.seq_lens_B.tolist() == seq_lens
        assert [(sequence_id, row.num_output_tokens) for sequence_id, row in inputs.sampled] == sampled
        assert inputs.last_token_indices.tolist() == last
        query_lens = list(plan.num_scheduled_tokens.values())
        assert query_lens[: inputs.num_decodes] == [1] * inputs.num_decodes
        assert 1 not in query_lens[inputs.num_decodes :]
        for table_M, sequence_id, seq_len in zip(
            inputs.block_table_GBM[0].tolist(), plan.num_scheduled_tokens, seq_lens, strict=True
        ):
            num_used = -(-seq_len // P)
            assert table_M[:num_used] == self.sequences[sequence_id].blocks[:num_used]

    def finish(self, plan: SchedulerOutput) -> dict[SequenceId, int]:
        """Advance; returns a token for each sequence that has nothing left to compute."""
        sampled = {}
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self.sequences[sequence_id]
            sequence.num_computed += num_tokens
            if sequence.num_computed == len(sequence.token_ids):
                sampled[sequence_id] = self._token()
                sequence.token_ids.append(sampled[sequence_id])
        return sampled

    def _arrive(self) -> NewSequence:
        self.num_arrivals += 1
        num_tokens = self.random.randint(1, MAX_MODEL_LEN)
        num_output = self.random.choice([0, 0, self.random.randrange(num_tokens)])
        num_shared = self.random.choice([0, self.random.randrange(num_tokens + 1) // P * P])
        sequence = ModelSequence(
            token_ids=[self._token() for _ in range(num_tokens)],
            blocks=[self._block() for _ in range(-(-num_tokens // P))],
            num_prompt_tokens=num_tokens - num_output,
            num_computed=min(num_shared, num_tokens - 1),
            num_shared=num_shared,
        )
        self.sequences[SequenceId(f"{self.num_arrivals}/0")] = sequence
        return new_sequence(
            f"{self.num_arrivals}/0",
            sequence.token_ids,
            sequence.blocks,
            num_output_tokens=num_output,
            num_computed_tokens=sequence.num_computed,
            num_shared_tokens=num_shared,
        )

    def _update(self, plan: SchedulerOutput, sequence_id: SequenceId, column: int) -> None:
        block_id = self._block()
        self.sequences[sequence_id].blocks[column : column + 1] = [block_id]
        plan.block_updates.append((sequence_id, 0, column, block_id))

    def _query_len(self, sequence: ModelSequence) -> int:
        return self.random.randint(1, len(sequence.token_ids) - sequence.num_computed)

    def _is_full(self, sequence_id: SequenceId) -> bool:
        return len(self.sequences[sequence_id].token_ids) > MAX_MODEL_LEN

    def _token(self) -> int:
        return self.random.randrange(1000)

    def _block(self) -> int:
        return self.random.randrange(500)


@pytest.mark.parametrize("seed", range(10))
def test_random_plans(seed: int) -> None:
    """A hundred plans in a row give, each, what a walk over the tokens gives; rows are taken over many times."""
    batch, model = new_batch(), PlainModel(random.Random(seed))
    for _ in range(100):
        plan = model.next_plan()
        batch.apply(plan)
        if plan.num_scheduled_tokens:
            model.check(plan, batch.build(plan))
        batch.finish(plan, model.finish(plan))
    assert model.num_arrivals > 2 * MAX_NUM_SEQS


# -- prompt log probabilities ----------------------------------------------------------------------


def owed(inputs: StepInputs) -> list[tuple[str, int, list[int]]]:
    return [(str(o.sequence_id), o.first_hidden, o.token_ids.tolist()) for o in inputs.owed_prompt_logprobs]


def test_owed_prompt_logprobs_over_chunks() -> None:
    """Seven prompt tokens as 3 + 4, behind a sequence that decodes. The token at T = 1 tells of the second one."""
    batch = new_batch()
    tokens = [10, 11, 12, 13, 14, 15, 16]
    plan = SchedulerOutput(
        1,
        new=[new_sequence("d", [5, 6], [1]), new_sequence("a", tokens, [9, 3], prompt_logprobs_from=1)],
        num_scheduled_tokens=scheduled(d=2, a=3),
    )
    batch.apply(plan)
    assert owed(batch.build(plan)) == [("a", 2, [11, 12, 13])]
    batch.finish(plan, {SequenceId("d"): 7})
    plan = SchedulerOutput(2, num_scheduled_tokens=scheduled(d=1, a=4))
    batch.apply(plan)
    assert owed(batch.build(plan)) == [("a", 1, [14, 15, 16])]
    batch.finish(plan, {SequenceId("d"): 8, SequenceId("a"): 70})
    plan = SchedulerOutput(3, num_scheduled_tokens=scheduled(d=1, a=1))
    batch.apply(plan)
    assert owed(batch.build(plan)) == []


def test_owed_prompt_logprobs_after_preemption() -> None:
    """Four of six prompt tokens and two of the output were there before: two more are owed, of a chunk of seven."""
    batch = new_batch()
    new = new_sequence("a", [10, 11, 12, 13, 14, 15, 70, 71], [9, 3], num_output_tokens=2, prompt_logprobs_from=4)
    plan = SchedulerOutput(1, new=[new], num_scheduled_tokens=scheduled(a=7))
    batch.apply(plan)
    assert owed(batch.build(plan)) == [("a", 3, [14, 15])]


def test_row_shows_its_tokens() -> None:
    """Those of the prompt and the output, as far as they go, though another sequence left its own behind them."""
    batch = new_batch()
    plan = SchedulerOutput(1, new=[new_sequence("a", list(range(20)), [1] * 5)], num_scheduled_tokens=scheduled(a=20))
    batch.apply(plan)
    batch.build(plan)
    batch.finish(plan, {})
    new = new_sequence("b", [10, 11, 70], [9], num_output_tokens=1)
    plan = SchedulerOutput(2, dropped=[SequenceId("a")], new=[new], num_scheduled_tokens=scheduled(b=3))
    batch.apply(plan)
    ((_, row),) = batch.build(plan).sampled
    assert (row.token_ids.tolist(), row.output_token_ids.tolist()) == ([10, 11, 70], [70])
    batch.finish(plan, {SequenceId("b"): 71})
    assert (row.token_ids.tolist(), row.output_token_ids.tolist()) == ([10, 11, 70, 71], [70, 71])
