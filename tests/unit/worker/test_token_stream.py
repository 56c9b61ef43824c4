"""Outputs over the wire, and merged on the way."""

import pytest

from pagoda.worker import token_stream
from pagoda.worker.token_stream import decode, encode, encode_in_batches
from pagoda.worker.types import FinishReason, RequestId, SequenceOutput, TokenLogprobs

A, B = RequestId("a"), RequestId("b")
LIKELY = TokenLogprobs(7, -0.25, 1, ((7, -0.25), (0, -2.5)))
UNLIKELY = TokenLogprobs(8, float("-inf"), 49152, ())


@pytest.mark.parametrize(
    "output",
    [
        SequenceOutput(A, 0, ()),
        SequenceOutput(A, 127, (1, 0, 2**31), num_cached_tokens=16),
        SequenceOutput(A, 127, (2**31,), num_cached_tokens=16),
        *(SequenceOutput(A, 1, (1,), reason) for reason in FinishReason),
        SequenceOutput(A, 1, (0,), FinishReason.STOP, stop_reason=0),
        SequenceOutput(A, 1, (), FinishReason.ERROR, error="no memory"),
        SequenceOutput(A, 0, (7, 8), logprobs=(LIKELY, UNLIKELY)),
        SequenceOutput(A, 0, (), prompt_logprobs=(UNLIKELY, LIKELY)),
    ],
)
def test_output_comes_back_from_the_wire(output: SequenceOutput) -> None:
    """Each field, alone and beside the output of another request."""
    assert decode(encode([output])) == [output]
    other = SequenceOutput(B, 0, (9,))
    assert decode(encode([other, output])) == [other, output]


def test_a_reason_that_is_none() -> None:
    """Of a worker that is newer, or lies."""
    batch = encode([SequenceOutput(A, 0, (9,), FinishReason.STOP)])
    batch.outputs[0].finish_reason = 99
    with pytest.raises(ValueError, match="finish reason 99"):
        decode(batch)


def test_columns_of_different_lengths() -> None:
    """Rather no tokens than those of others."""
    batch = encode([SequenceOutput(A, 0, (9,)), SequenceOutput(B, 0, (9,))])
    del batch.token_ids[0]
    with pytest.raises(ValueError, match="shorter"):
        decode(batch)


def test_merged_outputs() -> None:
    """What came of tokens and log probabilities is joined; the rest is as the later output says."""
    first = SequenceOutput(A, 0, (), prompt_logprobs=(LIKELY,), num_cached_tokens=16)
    second = SequenceOutput(A, 0, (7,), logprobs=(LIKELY,), prompt_logprobs=(UNLIKELY,), num_cached_tokens=16)
    third = SequenceOutput(A, 0, (8,), FinishReason.STOP, 8, logprobs=(UNLIKELY,), num_cached_tokens=16)
    assert first.merged_with(second).merged_with(third) == SequenceOutput(
        A, 0, (7, 8), FinishReason.STOP, 8, None, 16, (LIKELY, UNLIKELY), (LIKELY, UNLIKELY)
    )


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited for a slow reader goes out in several messages; an output that is too large by itself goes alone."""
    monkeypatch.setattr(token_stream, "MAX_NUMBERS", 10)
    small, large = SequenceOutput(A, 0, (7,) * 4), SequenceOutput(B, 0, (), prompt_logprobs=(LIKELY,) * 3)
    outputs = [small, small, small, large, small]
    batches = [decode(batch) for batch in encode_in_batches(outputs)]
    assert batches == [[small, small], [small], [large], [small]]
    assert [decode(batch) for batch in encode_in_batches([small])] == [[small]]
