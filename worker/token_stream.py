"""Outputs as `TokenBatch` messages, in both directions."""

from collections.abc import Iterable

from pagoda.proto import tokens_pb2
from pagoda.worker.types import FinishReason, RequestId, SequenceOutput

_TO_WIRE = {
    None: tokens_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: tokens_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: tokens_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: tokens_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: tokens_pb2.FINISH_REASON_ERROR,
}
_FROM_WIRE = {wire: reason for reason, wire in _TO_WIRE.items()}


def encode(outputs: Iterable[SequenceOutput]) -> tokens_pb2.TokenBatch:
    return tokens_pb2.TokenBatch(
        outputs=[
            tokens_pb2.SampleOutput(
                request_id=output.request_id,
                index=output.index,
                token_ids=output.token_ids,
                finish_reason=_TO_WIRE[output.finish_reason],
                stop_token_id=output.stop_reason,
                error=output.error or "",
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in outputs
        ]
    )


def decode(batch: tokens_pb2.TokenBatch) -> list[SequenceOutput]:
    return [
        SequenceOutput(
            request_id=RequestId(output.request_id),
            index=output.index,
            token_ids=tuple(output.token_ids),
            finish_reason=_FROM_WIRE[output.finish_reason],
            stop_reason=output.stop_token_id if output.HasField("stop_token_id") else None,
            error=output.error or None,
            num_cached_tokens=output.num_cached_tokens,
        )
        for output in batch.outputs
    ]
