"""Attention of every backend against the reference, and the reference against plain attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged import (
    DTYPES,
    HEADS,
    MIXES,
    REFERENCE,
    P,
    assert_close,
    attend,
    chunk_of,
    lay_out,
    plain_kind,
    random_contexts,
)

from pagoda.kernels.interface import AttentionKind, Operators
from pagoda.kernels.reference import attention_state, merge_states

KINDS = {
    "window": AttentionKind(scale=0.125, window=7),
    "window of one": AttentionKind(scale=0.125, window=1),
    "window larger than most": AttentionKind(scale=0.125, window=90),
    "window and sinks": AttentionKind(scale=0.125, window=70, num_sinks=5),
    "soft cap": AttentionKind(scale=0.25, soft_cap=3.0),
    "all of it": AttentionKind(scale=0.25, window=33, num_sinks=2, soft_cap=1.5),
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_reference_is_causal_attention(mix: list[tuple[int, int]], heads: tuple[int, int, int]) -> None:
    """The specification itself, against float64 attention with an explicit mask over contiguous tensors."""
    contexts = random_contexts(mix, heads)
    for context, out_QHD in zip(contexts, attend(REFERENCE, contexts), strict=True):
        query_len, seq_len = len(context.q_QHD), len(context.kv_S2KD)
        k_HSD, v_HSD = (
            context.kv_S2KD[:, part].double().repeat_interleave(heads[0] // heads[1], 1).transpose(0, 1)
            for part in (0, 1)
        )
        visible_QS = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        q_HQD = context.q_QHD.double().transpose(0, 1)
        expected_HQD = F.scaled_dot_product_attention(q_HQD, k_HSD, v_HSD, visible_QS, scale=heads[2] ** -0.5)
        assert_close(out_QHD, expected_HQD.transpose(0, 1).float())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_reference_masks_and_caps(kind: AttentionKind) -> None:
    """Windows, sinks and soft caps, against a mask and scores written out in float64."""
    (context,) = random_contexts([(60, 40)], HEADS[0])
    (out_QHD,) = attend(REFERENCE, [context], kind)
    own_Q1, positions_S = torch.arange(60, 100)[:, None], torch.arange(100)
    seen_QS = positions_S <= own_Q1
    if kind.window:
        seen_QS &= (own_Q1 - positions_S < kind.window) | (positions_S < kind.num_sinks)
    scores_HQS = torch.einsum("qhd,shd->hqs", context.q_QHD.double(), context.kv_S2KD[:, 0].double()) * kind.scale
    if kind.soft_cap:
        scores_HQS = (scores_HQS / kind.soft_cap).tanh() * kind.soft_cap
    weights_HQS = scores_HQS.masked_fill(~seen_QS, float("-inf")).softmax(-1)
    expected_QHD = torch.einsum("hqs,shd->qhd", weights_HQS, context.kv_S2KD[:, 1].double())
    assert_close(out_QHD, expected_QHD.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_attend_equals_reference(
    ops: Operators[Any, Any], mix: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """On the same rounded inputs; a NaN that was read anywhere shows in the output."""
    contexts = random_contexts(mix, heads, dtype)
    for actual, expected in zip(attend(ops, contexts), attend(REFERENCE, contexts), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [256, 640])
def test_large_heads_equal_reference(ops: Operators[Any, Any], head_size: int, dtype: torch.dtype) -> None:
    contexts = random_contexts([(37, 1), (5, 9)], (3, 1, head_size), dtype)
    for actual, expected in zip(attend(ops, contexts), attend(REFERENCE, contexts), strict=True):
        assert_close(actual, expected)


def test_peaked_scores(ops: Operators[Any, Any]) -> None:
    """Scores of size 8 * 30: a rounding of one moves its weight by 1e-5."""
    contexts = random_contexts([(203, 1), (37, 20)], HEADS[1])
    kind = AttentionKind(scale=1.0)
    for actual, expected in zip(attend(ops, contexts, kind), attend(REFERENCE, contexts, kind), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("position", [0, 70, 1059])
@pytest.mark.parametrize("query_len", [1, 40])
def test_a_key_that_is_no_number_shows(
    ops: Operators[Any, Any], query_len: int, position: int, soft_cap: float
) -> None:
    """In every output that sees it: a model that is broken must not give a plausible answer."""
    (context,) = random_contexts([(1100 - query_len, query_len)], HEADS[1])
    context.kv_S2KD[position, 0] = float("nan")
    kind = AttentionKind(scale=0.125, soft_cap=soft_cap)
    (actual_QHD,), (expected_QHD,) = attend(ops, [context], kind), attend(REFERENCE, [context], kind)
    assert torch.equal(actual_QHD.isnan(), expected_QHD.isnan())
    assert expected_QHD[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("mix", [MIXES["decode"], MIXES["decode and prefill"], [(0, 3), (10, 290)]], ids=str)
def test_windows_and_caps_equal_reference(
    ops: Operators[Any, Any], mix: list[tuple[int, int]], kind: AttentionKind, dtype: torch.dtype
) -> None:
    contexts = random_contexts(mix, HEADS[1], dtype)
    for actual, expected in zip(attend(ops, contexts, kind), attend(REFERENCE, contexts, kind), strict=True):
        assert_close(actual, expected)


def test_what_a_window_hides_may_be_nan(cpu_ops: Operators[Any, Any]) -> None:
    """A freed block is some other request's soon: a tile of hidden positions is not read."""
    (context,) = random_contexts([(299, 1)], HEADS[1])
    expected = attend(REFERENCE, [context], KINDS["window"])
    context.kv_S2KD[:192] = float("nan")
    for actual_QHD, expected_QHD in zip(attend(cpu_ops, [context], KINDS["window"]), expected, strict=True):
        assert_close(actual_QHD, expected_QHD)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_any_order_of_blocks_gives_the_same(ops: Operators[Any, Any], mix: list[tuple[int, int]]) -> None:
    """Which blocks hold a context changes no bit: the same numbers are summed in the same order."""
    contexts = random_contexts(mix, HEADS[1])
    expected = attend(ops, contexts, seed=0)
    for seed in (1, 2, 3):
        for actual_QHD, expected_QHD in zip(attend(ops, contexts, seed=seed), expected, strict=True):
            assert torch.equal(actual_QHD, expected_QHD)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [MIXES["decode"], MIXES["decode and prefill"]], ids=["decode", "decode and prefill"])
def test_alone_equals_in_a_batch(ops: Operators[Any, Any], mix: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Neighbours and padding change nothing but the order of sums."""
    contexts = random_contexts(mix, HEADS[1], dtype)
    for context, in_batch in zip(contexts, attend(ops, contexts), strict=True):
        (alone,) = attend(ops, [context])
        assert_close(alone, in_batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_cpu_kernels_do_not_see_the_batch(
    cpu_ops: Operators[Any, Any], mix: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Alone or in a batch, whole contexts or divided among threads: the very same bits."""
    contexts = random_contexts(mix, heads, dtype)
    for context, in_batch in zip(contexts, attend(cpu_ops, contexts), strict=True):
        assert torch.equal(attend(cpu_ops, [context])[0], in_batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_kernels_decode_as_they_prefill(cpu_ops: Operators[Any, Any], dtype: torch.dtype) -> None:
    """Each position of a prompt, decoded: the very same bits as of the prompt at once."""
    (prompt,) = random_contexts([(0, 150)], HEADS[1], dtype)
    (expected_THD,) = attend(cpu_ops, [prompt])
    paged, kind = lay_out([prompt]), plain_kind(HEADS[1][2])
    for position in range(150):
        plan = cpu_ops.plan(chunk_of(paged.batch, position, position + 1), P, dtype)
        out_THD = cpu_ops.attend(prompt.q_QHD[position : position + 1], paged.layer_N2PKD, plan, kind)
        assert torch.equal(out_THD[0], expected_THD[position])


@pytest.mark.parametrize("chunk_len", [1, P - 1, P, P + 1, 13])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_equal_the_whole(ops: Operators[Any, Any], dtype: torch.dtype, chunk_len: int) -> None:
    """A prompt that is written and attended in chunks, into fresh blocks of NaN, gives what it gives at once."""
    prompt_len, heads = 45, HEADS[1]
    (prompt,) = random_contexts([(0, prompt_len)], heads, dtype)
    (expected_THD,) = attend(ops, [prompt])
    paged = lay_out([prompt])
    paged.cache_NL2PKD.fill_(float("nan"))
    outs = []
    for start in range(0, prompt_len, chunk_len):
        end = min(start + chunk_len, prompt_len)
        plan = ops.plan(chunk_of(paged.batch, start, end), P, dtype)
        cos_TD, sin_TD = torch.ones(end - start, heads[2]), torch.zeros(end - start, heads[2])  # turns by nothing
        k_TKD, v_TKD = prompt.kv_S2KD[start:end].unbind(1)
        q_THD = ops.rope_kv_write(prompt.q_QHD[start:end], k_TKD, v_TKD, cos_TD, sin_TD, paged.layer_N2PKD, plan)
        outs.append(ops.attend(q_THD, paged.layer_N2PKD, plan, plain_kind(heads[2])))
    assert_close(torch.cat(outs), expected_THD)


@pytest.mark.parametrize("split", [0, 1, 20, 39, 40])
def test_merged_states_are_the_state_of_the_whole(split: int) -> None:
    """Attention over some positions and over the others, merged; over none of them, too."""
    kind = plain_kind(16)
    q_HD, k_SHD, v_SHD = torch.randn(2, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    parts = [attention_state(q_HD, k_SHD[part], v_SHD[part], kind) for part in (slice(split), slice(split, 40))]
    for actual, expected in zip(merge_states(*parts), attention_state(q_HD, k_SHD, v_SHD, kind), strict=True):
        assert_close(actual, expected)
