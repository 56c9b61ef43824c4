"""One rank: builds a step's inputs, runs the model, samples.

What may not go in here: deciding what runs (the scheduler does), requests and their life, which kernel runs
(`kernels/dispatch.py` does), loading (`build.py` does).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda.kernels.interface import AttentionBatch, Operators
from pagoda.worker.input_batch import InputBatch, StepInputs
from pagoda.worker.logprobs import prompt_logprobs, token_logprobs
from pagoda.worker.models.decoder import Decoder
from pagoda.worker.sampler import sample
from pagoda.worker.types import ModelRunnerOutput, SchedulerOutput, SequenceId, TokenLogprobs


class Runner:
    """Implements `Executor` in this process, on one device."""

    def __init__(
        self,
        model: Decoder,
        ops: Operators[Any, Any],
        cache_NL2PKD: torch.Tensor,
        batch: InputBatch,
    ) -> None:
        self._model = model
        self._ops = ops
        self._cache_NL2PKD = cache_NL2PKD
        self._batch = batch
        self._device = cache_NL2PKD.device

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._batch.apply(plan)
        if not plan.num_scheduled_tokens:
            return ModelRunnerOutput({})
        with torch.inference_mode():
            if plan.block_copies:
                self._ops.copy_blocks(self._cache_NL2PKD, plan.block_copies)
            inputs = self._batch.build(plan)
            hidden_TE = self._model(
                self._to_device(inputs.token_ids_T),
                self._to_device(inputs.positions_T),
                self._cache_NL2PKD,
                self._plan_attention(inputs),  # one for each group
            )
            result = ModelRunnerOutput({}, prompt_logprobs=self._prompt_logprobs(inputs, hidden_TE))
            if inputs.sampled:
                self._sample(inputs, hidden_TE, result)
        self._batch.finish(plan, result.sampled)
        return result

    def shutdown(self) -> None:
        self._cache_NL2PKD = torch.empty(0)

    def _sample(self, inputs: StepInputs, hidden_TE: torch.Tensor, result: ModelRunnerOutput) -> None:
        """Put a token for each sequence that gets one into `result`, with its log probability where asked for.

        Of several ranks the first one decides.
        """
        context = self._model.context
        logits_BV = self._model.logits(hidden_TE[self._to_device(inputs.last_token_indices)])
        if context.rank > 0:
            tokens = context.from_first([0] * len(inputs.sampled), self._device)
            result.sampled.update((i, token) for (i, _), token in zip(inputs.sampled, tokens, strict=True))
            return
        asked = [index for index, (_, row) in enumerate(inputs.sampled) if row.sampling.logprobs is not None]
        asked_logits = logits_BV[asked] if asked else None  # a copy: sampling mutates them
        tokens = context.from_first(sample(logits_BV, [row for _, row in inputs.sampled], self._ops), self._device)
        result.sampled.update((i, token) for (i, _), token in zip(inputs.sampled, tokens, strict=True))
        if asked_logits is not None:
            sequence_ids = [inputs.sampled[index][0] for index in asked]
            num_top = [inputs.sampled[index][1].sampling.logprobs or 0 for index in asked]
            entries = token_logprobs(asked_logits, [tokens[index] for index in asked], num_top)
            result.logprobs.update(zip(sequence_ids, entries, strict=True))

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden_TE: torch.Tensor
    ) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
        return {
            owed.sequence_id: tuple(
                prompt_logprobs(
                    hidden_TE[owed.first_hidden : owed.first_hidden + len(owed.token_ids)],
                    owed.token_ids.tolist(),
                    owed.row.sampling.prompt_logprobs or 0,
                    logits=self._model.logits,
                    vocab_size=self._model.config.vocab_size,
                )
            )
            for owed in inputs.owed_prompt_logprobs
        }

    def _plan_attention(self, inputs: StepInputs) -> list[object]:
        query_start_loc, seq_lens_B = self._to_device(inputs.query_start_loc), self._to_device(inputs.seq_lens_B)
        query_lens = tuple(np.diff(inputs.query_start_loc).tolist())
        seq_lens = tuple(inputs.seq_lens_B.tolist())
        plans = []
        for block_table_BM, slot_mapping_T in zip(inputs.block_table_GBM, inputs.slot_mapping_GT, strict=True):
            batch = AttentionBatch(
                block_table_BM=self._to_device(block_table_BM),
                query_start_loc=query_start_loc,
                seq_lens_B=seq_lens_B,
                slot_mapping_T=self._to_device(slot_mapping_T),
                num_decodes=inputs.num_decodes,
                query_lens=query_lens,
                seq_lens=seq_lens,
            )
            plans.append(self._ops.plan(batch, self._cache_NL2PKD.shape[3], self._cache_NL2PKD.dtype))
        return plans

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, new floating-point tensors have `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
