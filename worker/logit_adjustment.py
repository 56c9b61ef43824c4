"""Changes logits as requests ask for: no early end, logit bias, penalties, in this order, as in vLLM.

All work is on lists of (row, token) pairs, so it costs as much as there are tokens to adjust, not a vocabulary a row.
A pair may come several times: what is written is the same each time.

Dimensions: B sequences, V vocabulary, X pairs.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pagoda.worker.input_batch import IntArray, Row

_REPETITION_RANGE = (1e-4, 1e4)
"""Beyond these, a repetition penalty forces or forbids all the same, and logits would leave float32's range."""


def adjust_logits(logits_BV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """The adjusted logits: `logits_BV`, mutated, or a float32 copy of it if anything but a ban is asked for."""
    _ban_early_ends(logits_BV, rows)
    adjusted = [(index, row) for index, row in enumerate(rows) if row.sampling.adjusts_logits]
    if adjusted:
        logits_BV = logits_BV.float()
        _add_bias(logits_BV, adjusted)
        _penalise_repetition(logits_BV, adjusted)
        _penalise_output(logits_BV, adjusted)
    return logits_BV


def _ban_early_ends(logits_BV: torch.Tensor, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        if row.num_output_tokens < row.sampling.min_tokens:
            banned = set(row.sampling.stop_token_ids)
            if not row.sampling.ignore_eos:
                banned |= row.eos_token_ids
            logits_BV[index, sorted(banned)] = float("-inf")


def _add_bias(logits_BV: torch.Tensor, rows: Iterable[tuple[int, Row]]) -> None:
    biases = [(i, token, bias) for i, row in rows for token, bias in row.sampling.logit_bias.items()]
    if biases:
        row_X, token_X, bias_X = zip(*biases, strict=True)
        where = (torch.tensor(row_X, device=logits_BV.device), torch.tensor(token_X, device=logits_BV.device))
        logits_BV[where] += torch.tensor(bias_X, dtype=torch.float32, device=logits_BV.device)


def _penalise_repetition(logits_BV: torch.Tensor, rows: Iterable[tuple[int, Row]]) -> None:
    least, most = _REPETITION_RANGE
    pairs = [
        (i, row.token_ids, min(max(row.sampling.repetition_penalty, least), most))
        for i, row in rows
        if row.sampling.repetition_penalty != 1
    ]
    if pairs:
        where, penalty_X = _spread(pairs, logits_BV.device)
        logits_X = logits_BV[where]
        logits_BV[where] = torch.where(logits_X > 0, logits_X / penalty_X, logits_X * penalty_X)


def _penalise_output(logits_BV: torch.Tensor, rows: Sequence[tuple[int, Row]]) -> None:
    presence = [
        (i, row.output_token_ids, row.sampling.presence_penalty) for i, row in rows if row.sampling.presence_penalty
    ]
    if presence:
        where, penalty_X = _spread(presence, logits_BV.device)
        logits_BV[where] = logits_BV[where] - penalty_X
    frequency = [
        (i, row.output_token_ids, row.sampling.frequency_penalty) for i, row in rows if row.sampling.frequency_penalty
    ]
    if frequency:
        where, penalty_X = _spread(frequency, logits_BV.device)
        logits_BV.index_put_(where, -penalty_X, accumulate=True)


def _spread(
    pairs: Sequence[tuple[int, IntArray, float]], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(row, tokens, value) as ((row_X, token_X), value_X)."""
    lengths = [len(tokens) for _, tokens, _ in pairs]
    rows = np.repeat(np.array([index for index, _, _ in pairs], np.int64), lengths)
    tokens = np.concatenate([tokens for _, tokens, _ in pairs]).astype(np.int64)
    values = np.repeat(np.array([value for _, _, value in pairs], np.float32), lengths)
    row_X, token_X, value_X = (torch.from_numpy(array).to(device) for array in (rows, tokens, values))
    return (row_X, token_X), value_X
