"""The rank's copy of the running sequences, and the arrays of one step.

Every running sequence has a row. Rows hold what changes slowly (tokens, block table); a step's arrays are gathered
from them with a handful of numpy calls, however many sequences run. No torch: the runner moves the arrays over.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.worker.types import NewSequence, SamplingParams, SchedulerOutput, SequenceId

IntArray = npt.NDArray[np.integer]


@dataclass(slots=True)
class Row:
    """What a row holds besides its arrays."""

    index: int
    num_tokens: int
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    memory: IntArray
    """Its tokens, a view on the batch's memory; valid up to `num_tokens`."""
    next_prompt_logprob: int
    """Index of the first prompt token whose log probability is owed; the prompt's length if none is."""

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> IntArray:
        return self.memory[: self.num_tokens]

    @property
    def output_token_ids(self) -> IntArray:
        return self.memory[self.num_prompt_tokens : self.num_tokens]


@dataclass(frozen=True, slots=True)
class OwedPromptLogprobs:
    """Prompt tokens whose log probabilities a step can tell."""

    sequence_id: SequenceId
    row: Row
    first_hidden: int
    """Index in T of the token before the first of them."""
    token_ids: IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as arrays, sequences in the plan's order. T tokens, B sequences, M columns, G groups of layers."""

    token_ids_T: IntArray
    positions_T: IntArray
    slot_mapping_GT: IntArray
    block_table_GBM: IntArray
    query_start_loc: IntArray
    seq_lens_B: IntArray
    num_decodes: int
    sampled: tuple[tuple[SequenceId, Row], ...]
    """Sequences that get a token: those with nothing left to compute after this step."""
    last_token_indices: IntArray
    """Index in T of the last token of each of `sampled`."""
    owed_prompt_logprobs: tuple[OwedPromptLogprobs, ...]


class InputBatch:
    """Rows of running sequences. Applies plans and sampled tokens in order; one thread."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        # Zeroed memory that is never touched costs nothing, so rows may be as long as the longest context.
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._block_tables = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._num_shared = np.zeros(max_num_seqs, np.int64)
        self._rows: dict[SequenceId, Row] = {}
        self._unused = list(reversed(range(max_num_seqs)))

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in what a plan changes. Sequences it drops or updates but that are not here are ignored."""
        for sequence_id in plan.dropped:
            if (row := self._rows.pop(sequence_id, None)) is not None:
                self._unused.append(row.index)
        for new in plan.new:
            self._add(new)
        for sequence_id, group, column, block_id in plan.block_updates:
            if (row := self._rows.get(sequence_id)) is not None:
                self._block_tables[group, row.index, column] = block_id

    def build(self, plan: SchedulerOutput) -> StepInputs:
        """The arrays of a plan that schedules something and has been applied."""
        rows = [self._rows[sequence_id] for sequence_id in plan.num_scheduled_tokens]
        indices_B = np.fromiter((row.index for row in rows), np.int64, len(rows))
        query_lens_B = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(rows))
        num_tokens_B = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
        starts_B = self._num_computed[indices_B]
        seq_lens_B = starts_B + query_lens_B
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query_lens_B, out=query_start_loc[1:])

        rows_T = np.repeat(indices_B, query_lens_B)
        positions_T = np.arange(len(rows_T)) + np.repeat(starts_B - query_start_loc[:-1], query_lens_B)
        blocks_GT = self._block_tables[:, rows_T, positions_T // self._block_size].astype(np.int64)
        slot_mapping_GT = blocks_GT * self._block_size + positions_T % self._block_size
        slot_mapping_GT[:, positions_T < self._num_shared[rows_T]] = -1

        is_sampled_B = seq_lens_B == num_tokens_B
        not_decoding = np.flatnonzero(query_lens_B != 1)
        num_columns = -(-int(seq_lens_B.max()) // self._block_size)
        return StepInputs(
            token_ids_T=self._token_ids[rows_T, positions_T],
            positions_T=positions_T,
            slot_mapping_GT=slot_mapping_GT,
            block_table_GBM=self._block_tables[:, indices_B, :num_columns],
            query_start_loc=query_start_loc,
            seq_lens_B=seq_lens_B.astype(np.int32),
            num_decodes=int(not_decoding[0]) if len(not_decoding) else len(rows),
            sampled=tuple(
                (sequence_id, row)
                for sequence_id, row, is_sampled in zip(plan.num_scheduled_tokens, rows, is_sampled_B, strict=True)
                if is_sampled
            ),
            last_token_indices=query_start_loc[1:][is_sampled_B] - 1,
            owed_prompt_logprobs=self._owed_prompt_logprobs(plan, rows, query_start_loc),
        )

    def finish(self, plan: SchedulerOutput, sampled: dict[SequenceId, int]) -> None:
        """The step was computed: remember that, and its tokens."""
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows[sequence_id]
            self._num_computed[row.index] += num_tokens
            token_id = sampled.get(sequence_id)
            if token_id is not None and row.num_tokens < self._token_ids.shape[1]:
                self._token_ids[row.index, row.num_tokens] = token_id
                row.num_tokens += 1

    def _owed_prompt_logprobs(
        self, plan: SchedulerOutput, rows: list[Row], query_start_loc: IntArray
    ) -> tuple[OwedPromptLogprobs, ...]:
        owed = []
        for position, (sequence_id, row) in enumerate(zip(plan.num_scheduled_tokens, rows, strict=True)):
            if row.next_prompt_logprob >= row.num_prompt_tokens:
                continue
            start = int(self._num_computed[row.index])
            # A token's log probability is told by the hidden state of the token before it.
            end = min(start + plan.num_scheduled_tokens[sequence_id], row.num_prompt_tokens - 1) + 1
            first = max(row.next_prompt_logprob, start + 1)
            if first < end:
                first_hidden = int(query_start_loc[position]) + first - 1 - start
                owed.append(OwedPromptLogprobs(sequence_id, row, first_hidden, row.memory[first:end]))
        return tuple(owed)

    def _add(self, new: NewSequence) -> None:
        index = self._unused.pop()
        self._rows[new.sequence_id] = Row(
            index=index,
            num_tokens=len(new.token_ids),
            num_prompt_tokens=len(new.token_ids) - new.num_output_tokens,
            sampling=new.sampling,
            seed=new.seed,
            eos_token_ids=new.eos_token_ids,
            memory=self._token_ids[index],
            next_prompt_logprob=new.next_prompt_logprob,
        )
        self._token_ids[index, : len(new.token_ids)] = new.token_ids
        for group, table in enumerate(new.block_tables):
            self._block_tables[group, index, : len(table)] = table
        self._num_computed[index] = new.num_computed_tokens
        self._num_shared[index] = new.num_shared_tokens
