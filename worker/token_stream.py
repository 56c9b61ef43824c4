"""Outputs as `TokenBatch` messages, in both directions."""

from collections.abc import Iterable, Iterator, Sequence

from pagoda.proto import tokens_pb2
from pagoda.worker.types import FinishReason, RequestId, SequenceOutput, TokenLogprobs

_TO_WIRE = {
    None: tokens_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: tokens_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: tokens_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: tokens_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: tokens_pb2.FINISH_REASON_ERROR,
    FinishReason.DEADLINE: tokens_pb2.FINISH_REASON_DEADLINE,
    FinishReason.SHED: tokens_pb2.FINISH_REASON_SHED,
}
_FROM_WIRE = {wire: reason for reason, wire in _TO_WIRE.items()}


MAX_NUMBERS = 2**20
"""Tokens and log probabilities in one message, about 8 MiB; a single output may have more."""


def encode_in_batches(outputs: Iterable[SequenceOutput]) -> Iterator[tokens_pb2.TokenBatch]:
    """As few messages as the bound on their size allows: log probabilities that wait for a slow reader add up."""
    batch: list[SequenceOutput] = []
    num_numbers = 0
    for output in outputs:
        added = _num_numbers(output)
        if batch and num_numbers + added > MAX_NUMBERS:
            yield encode(batch)
            batch, num_numbers = [], 0
        batch.append(output)
        num_numbers += added
    yield encode(batch)


def _num_numbers(output: SequenceOutput) -> int:
    entries = output.logprobs + output.prompt_logprobs
    return len(output.token_ids) + (len(entries) + 2 * sum(len(entry.top) for entry in entries) if entries else 0)


def encode(outputs: Iterable[SequenceOutput]) -> tokens_pb2.TokenBatch:
    singles: list[SequenceOutput] = []
    others: list[SequenceOutput] = []
    for output in outputs:
        (singles if _is_single(output) else others).append(output)
    return tokens_pb2.TokenBatch(
        outputs=map(_encode_output, others),
        request_ids=[output.request_id for output in singles],
        indexes=[output.index for output in singles],
        token_ids=[output.token_ids[0] for output in singles],
        num_cached_tokens=[output.num_cached_tokens for output in singles],
    )


def decode(batch: tokens_pb2.TokenBatch) -> list[SequenceOutput]:
    """Raises `ValueError` for lists of different lengths, and for reasons that are none."""
    columns = zip(batch.request_ids, batch.indexes, batch.token_ids, batch.num_cached_tokens, strict=True)
    singles = [
        SequenceOutput(RequestId(request_id), index, (token_id,), num_cached_tokens=num_cached_tokens)
        for request_id, index, token_id, num_cached_tokens in columns
    ]
    return singles + list(map(_decode_output, batch.outputs))


def _is_single(output: SequenceOutput) -> bool:
    """Whether it is one token and nothing else."""
    return (
        len(output.token_ids) == 1
        and output.finish_reason is None
        and not output.logprobs
        and not output.prompt_logprobs
    )


def _encode_output(output: SequenceOutput) -> tokens_pb2.SampleOutput:
    return tokens_pb2.SampleOutput(
        request_id=output.request_id,
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=_TO_WIRE[output.finish_reason],
        stop_token_id=output.stop_reason,
        error=output.error or "",
        num_cached_tokens=output.num_cached_tokens,
        logprobs=_encode_logprobs(output.logprobs),
        prompt_logprobs=_encode_logprobs(output.prompt_logprobs),
    )


def _decode_output(output: tokens_pb2.SampleOutput) -> SequenceOutput:
    if output.finish_reason not in _FROM_WIRE:
        raise ValueError(f"finish reason {output.finish_reason}")
    return SequenceOutput(
        request_id=RequestId(output.request_id),
        index=output.index,
        token_ids=tuple(output.token_ids),
        finish_reason=_FROM_WIRE[output.finish_reason],
        stop_reason=output.stop_token_id if output.HasField("stop_token_id") else None,
        error=output.error or None,
        num_cached_tokens=output.num_cached_tokens,
        logprobs=_decode_logprobs(output.logprobs) if output.logprobs else (),
        prompt_logprobs=_decode_logprobs(output.prompt_logprobs) if output.prompt_logprobs else (),
    )


def _encode_logprobs(entries: Sequence[TokenLogprobs]) -> list[tokens_pb2.LogprobEntry] | None:
    if not entries:
        return None
    return [
        tokens_pb2.LogprobEntry(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top_token_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in entries
    ]


def _decode_logprobs(entries: Sequence[tokens_pb2.LogprobEntry]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            entry.token_id,
            entry.logprob,
            entry.rank,
            tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)),
        )
        for entry in entries
    )
