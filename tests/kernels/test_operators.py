"""Every backend against the reference, and the reference against plain attention over contiguous tensors.

Dimensions: T tokens of the batch, B requests, Q query tokens and S context of one request, H query heads, K KV heads,
D head size, N blocks in the pool, L layers, P tokens per block, M block-table columns, E and F features.

All memory that an operator may not read is NaN: slots past a context, blocks of nobody, other layers. Unused entries
of a block table are such a block or -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pagoda.kernels.interface import AttentionBatch, Operators
from pagoda.kernels.reference import ReferenceOperators
from pagoda.kernels.torch_ops import TorchOperators

REFERENCE = ReferenceOperators()
BACKENDS: list[Operators[Any]] = [TorchOperators()]
"""Backends that run on this machine. A new one joins here and runs all of this file."""

P = 4
NUM_LAYERS, LAYER = 3, 1
"""The pool's layers, and the one that is tested: its view is strided, and the others must stay as they are."""
DTYPES = (torch.float32, torch.bfloat16)
HEADS = ((2, 2, 16), (9, 3, 64), (4, 1, 80), (16, 2, 128))
"""(H, K, D) with G = 1, 3, 4 and 8; D with and without powers of two."""

TOLERANCE = {
    # Some hundred float32 products of size 1 are summed in another order: a few roundings of 6e-8, times their size.
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    # Results are rounded to 8 bits (2**-9 of their size); backends may round probabilities to 8 bits too, each by at
    # most 2**-9, which moves a mean of values of size 4 by at most 4 * 2**-9.
    torch.bfloat16: {"rtol": 2**-7, "atol": 4 * 2**-9},
}

MIXES = {
    "first token": [(0, 1)],
    "decode": [(0, 1), (P - 2, 1), (P - 1, 1), (P, 1), (37, 1), (203, 1)],
    "decode, equal contexts that fill their blocks": [(2 * P - 1, 1)] * 3,
    "prefill": [(0, P - 1), (0, P), (0, P + 1), (0, 33)],
    "prefill over a cached prefix": [(1, P), (P - 1, 2), (P, 3), (P + 1, P + 1), (4 * P, 7), (50, 23)],
    "decode and prefill": [(9, 1), (0, 1), (64, 1), (0, 19), (33, 5), (5, 1)],
    "prefill of many tiles": [(0, 300), (67, 530)],
}
"""(tokens of context before this step, query tokens) of each request; those with one query token lead."""


@dataclass(frozen=True, slots=True)
class Context:
    """One request, contiguous: its queries, and keys and values of its whole context, which ends with the queries."""

    q_QHD: torch.Tensor
    kv_S2KD: torch.Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """Requests laid out in a pool."""

    cache_NL2PKD: torch.Tensor
    batch: AttentionBatch

    @property
    def layer_N2PKD(self) -> torch.Tensor:
        return self.cache_NL2PKD[:, LAYER]


def random_contexts(
    mix: Sequence[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Context]:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_size = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        Context(normal(query_len, num_heads, head_size), normal(before + query_len, 2, num_kv_heads, head_size))
        for before, query_len in mix
    ]


def lay_out(contexts: Sequence[Context], *, seed: int = 0) -> Paged:
    """Put contexts into blocks in random order, in a pool that is NaN elsewhere."""
    query_lens = [len(context.q_QHD) for context in contexts]
    seq_lens = [len(context.kv_S2KD) for context in contexts]
    num_blocks = [-(-seq_len // P) for seq_len in seq_lens]
    shape_2KD = contexts[0].kv_S2KD.shape[1:]
    order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    poison = order.pop()
    pool_shape = (len(order) + 1, NUM_LAYERS, 2, P, *shape_2KD[1:])
    cache_NL2PKD = torch.full(pool_shape, float("nan"), dtype=contexts[0].kv_S2KD.dtype)
    block_table_BM = torch.full((len(contexts), max(num_blocks) + 2), poison, dtype=torch.int32)
    block_table_BM[:, ::2] = -1
    slots = []
    for request, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(num_blocks[request])]
        block_table_BM[request, : len(blocks)] = torch.tensor(blocks)
        own = [blocks[position // P] * P + position % P for position in range(seq_lens[request])]
        slots += own[seq_lens[request] - query_lens[request] :]
        for slot, kv_2KD in zip(own, context.kv_S2KD, strict=True):
            cache_NL2PKD[slot // P, LAYER, :, slot % P] = kv_2KD
    num_decodes = next((i for i, query_len in enumerate(query_lens) if query_len != 1), len(query_lens))
    batch = AttentionBatch(
        block_table_BM=block_table_BM,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping_T=torch.tensor(slots),
        num_decodes=num_decodes,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
    )
    return Paged(cache_NL2PKD, batch)


def attend(ops: Operators[Any], contexts: Sequence[Context], *, seed: int = 0) -> list[torch.Tensor]:
    """Each request's attention output, QHD."""
    paged = lay_out(contexts, seed=seed)
    q_THD = torch.cat([context.q_QHD for context in contexts])
    plan = ops.plan(paged.batch, P, q_THD.dtype)
    out_THD = ops.attend(q_THD, paged.layer_N2PKD, plan, scale_of(q_THD))
    assert out_THD.dtype == q_THD.dtype
    return list(out_THD.split(list(paged.batch.query_lens)))


def scale_of(q_THD: torch.Tensor) -> float:
    return float(q_THD.shape[-1] ** -0.5)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, equal_nan: bool = False) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype], equal_nan=equal_nan)


@pytest.fixture(params=BACKENDS, ids=lambda ops: ops.name)
def ops(request: pytest.FixtureRequest) -> Operators[Any]:
    backend: Operators[Any] = request.param
    return backend


# -- attention -------------------------------------------------------------------------------------


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
        expected_HQD = F.scaled_dot_product_attention(q_HQD, k_HSD, v_HSD, visible_QS, scale=scale_of(context.q_QHD))
        assert_close(out_QHD, expected_HQD.transpose(0, 1).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_attend_equals_reference(
    ops: Operators[Any], mix: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """On the same rounded inputs; a NaN that was read anywhere shows in the output."""
    contexts = random_contexts(mix, heads, dtype)
    for actual, expected in zip(attend(ops, contexts), attend(REFERENCE, contexts), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_any_order_of_blocks_gives_the_same(ops: Operators[Any], mix: list[tuple[int, int]]) -> None:
    """Which blocks hold a context changes no bit: the same numbers are summed in the same order."""
    contexts = random_contexts(mix, HEADS[1])
    expected = attend(ops, contexts, seed=0)
    for seed in (1, 2, 3):
        for actual_QHD, expected_QHD in zip(attend(ops, contexts, seed=seed), expected, strict=True):
            assert torch.equal(actual_QHD, expected_QHD)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [MIXES["decode"], MIXES["decode and prefill"]], ids=["decode", "decode and prefill"])
def test_alone_equals_in_a_batch(ops: Operators[Any], mix: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Neighbours and padding change nothing but the order of sums."""
    contexts = random_contexts(mix, HEADS[1], dtype)
    for context, in_batch in zip(contexts, attend(ops, contexts), strict=True):
        (alone,) = attend(ops, [context])
        assert_close(alone, in_batch)


@pytest.mark.parametrize("chunk_len", [1, P - 1, P, P + 1, 13])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_equal_the_whole(ops: Operators[Any], dtype: torch.dtype, chunk_len: int) -> None:
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
        outs.append(ops.attend(q_THD, paged.layer_N2PKD, plan, scale_of(q_THD)))
    assert_close(torch.cat(outs), expected_THD)


def chunk_of(prompt: AttentionBatch, start: int, end: int) -> AttentionBatch:
    """The step that computes tokens `start:end` of a batch of one request without context."""
    return AttentionBatch(
        block_table_BM=prompt.block_table_BM,
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens_B=torch.tensor([end], dtype=torch.int32),
        slot_mapping_T=prompt.slot_mapping_T[start:end],
        num_decodes=int(end - start == 1),
        query_lens=(end - start,),
        seq_lens=(end,),
    )


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Arguments of `rope_kv_write` for the queries of `MIXES["decode and prefill"]`, into a pool of NaN."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    cache_NL2PKD: torch.Tensor
    batch: AttentionBatch

    def apply(self, ops: Operators[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rotated queries, the pool afterwards); this object stays as it is."""
        cache_NL2PKD = self.cache_NL2PKD.clone()
        plan = ops.plan(self.batch, P, self.q_THD.dtype)
        out_THD = ops.rope_kv_write(
            self.q_THD, self.k_TKD, self.v_TKD, self.cos_TD, self.sin_TD, cache_NL2PKD[:, LAYER], plan
        )
        return out_THD, cache_NL2PKD


def random_write(heads: tuple[int, int, int], dtype: torch.dtype, *, skipped: Sequence[int] = ()) -> Write:
    """Queries, keys and values are views of one fused projection, as in the model. `skipped` tokens have slot -1."""
    num_heads, num_kv_heads, head_size = heads
    paged = lay_out(random_contexts(MIXES["decode and prefill"], heads, dtype))
    batch = paged.batch
    batch.slot_mapping_T[list(skipped)] = -1
    generator = torch.Generator().manual_seed(1)
    num_tokens = len(batch.slot_mapping_T)
    qkv_TXD = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, generator=generator).to(dtype)
    angles_TD = 7 * torch.rand(num_tokens, head_size // 2, generator=generator).repeat(1, 2)
    q_THD, k_TKD, v_TKD = qkv_TXD.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    poison_NL2PKD = torch.full_like(paged.cache_NL2PKD, float("nan"))
    return Write(q_THD, k_TKD, v_TKD, angles_TD.cos(), angles_TD.sin(), poison_NL2PKD, batch)


@pytest.mark.parametrize("skipped", [(), (0, 2, 7, 20)], ids=["all", "some skipped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rope_kv_write_equals_reference(
    ops: Operators[Any], heads: tuple[int, int, int], dtype: torch.dtype, skipped: tuple[int, ...]
) -> None:
    """Rotated queries, and the whole pool: what neither wrote is NaN in both."""
    write = random_write(heads, dtype, skipped=skipped)
    (actual_THD, actual_NL2PKD), (expected_THD, expected_NL2PKD) = write.apply(ops), write.apply(REFERENCE)
    assert_close(actual_THD, expected_THD)
    assert_close(actual_NL2PKD, expected_NL2PKD, equal_nan=True)


@pytest.mark.parametrize("skipped", [(), (0, 2, 7, 20), range(28)], ids=["all", "some skipped", "none"])
@pytest.mark.parametrize("backend", [REFERENCE, *BACKENDS], ids=lambda backend: backend.name)
def test_only_the_slots_of_a_step_are_written(backend: Operators[Any], skipped: Sequence[int]) -> None:
    """Slot -1 writes nothing, nor does any token into another layer, another block or the rest of its own block."""
    write = random_write(HEADS[1], torch.float32, skipped=skipped)
    _, cache_NL2PKD = write.apply(backend)
    expected_NLP = torch.zeros(cache_NL2PKD.shape[0], NUM_LAYERS, P, dtype=torch.bool)
    for slot in write.batch.slot_mapping_T.tolist():
        if slot >= 0:
            expected_NLP[slot // P, LAYER, slot % P] = True
    written_NL2P = cache_NL2PKD.isfinite().all(-1).all(-1)
    assert torch.equal(written_NL2P, expected_NLP[:, :, None].expand_as(written_NL2P))
    assert torch.equal(cache_NL2PKD.isnan().all(-1).all(-1), ~written_NL2P)


@pytest.mark.parametrize(
    "pairs", [[], [(2, 5)], [(0, 1), (3, 2), (6, 7)], [(4, 0), (4, 6)]], ids=["none", "one", "some", "one source"]
)
@pytest.mark.parametrize("backend", [REFERENCE, *BACKENDS], ids=lambda backend: backend.name)
def test_copy_blocks_copies_whole_blocks_and_nothing_else(
    backend: Operators[Any], pairs: list[tuple[int, int]]
) -> None:
    """All layers, keys and values; slots not written yet are copied as they are."""
    cache_NL2PKD = torch.randn(8, NUM_LAYERS, 2, P, 3, 16, generator=torch.Generator().manual_seed(0))
    cache_NL2PKD[:, :, :, P - 1] = float("nan")
    sources = list(range(8))
    for source, destination in pairs:
        sources[destination] = source
    expected_NL2PKD = cache_NL2PKD[sources]
    backend.copy_blocks(cache_NL2PKD, pairs)
    assert torch.equal(cache_NL2PKD.nan_to_num(9.0), expected_NL2PKD.nan_to_num(9.0))


# -- norms and activations -------------------------------------------------------------------------


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of size 1, but for the first, of zeros, and the last, of size 10,000."""
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    rows[0] = 0
    rows[-1] *= 1e4
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 96), (5, 9, 64)], ids=str)
def test_rms_norm_equals_reference(ops: Operators[Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Over rows, and over the heads of a view of a fused projection, as Qwen3 does."""
    wide = random_rows(*shape[:-1], 2 * shape[-1], dtype=dtype)
    x = wide[..., : shape[-1]]
    weight = random_rows(3, shape[-1], dtype=dtype)[1]
    assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_reference_rms_norm_by_hand() -> None:
    """3 and 4 have a mean square of 12.5; with eps 3.5 the root is 4."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    assert REFERENCE.rms_norm(x, weight, 3.5).tolist() == [[0.75, 2.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_equals_reference(ops: Operators[Any], dtype: torch.dtype) -> None:
    """The sum goes on as the residual stream, in float32 whatever the norm's type; the arguments are left alone."""
    x_TE, residual_TE = random_rows(7, 96, dtype=dtype), random_rows(14, 96, dtype=torch.float32)[7:]
    weight_E = random_rows(3, 96, dtype=dtype)[1]
    before = x_TE.clone(), residual_TE.clone()
    actual = ops.add_rms_norm(x_TE, residual_TE, weight_E, 1e-5)
    expected = REFERENCE.add_rms_norm(x_TE, residual_TE, weight_E, 1e-5)
    assert [tensor.dtype for tensor in actual] == [dtype, torch.float32]
    for actual_TE, expected_TE in zip(actual, expected, strict=True):
        assert_close(actual_TE, expected_TE)
    assert torch.equal(x_TE, before[0])
    assert torch.equal(residual_TE, before[1])


def test_reference_add_rms_norm_by_hand() -> None:
    """1 + 2**-9 is no bfloat16, but it is what the residual stream keeps of a bfloat16 1 and a float32 2**-9."""
    x, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    normed, total = REFERENCE.add_rms_norm(x, torch.tensor([[2.0**-9, -1.0]]), weight, 0.0)
    assert total.tolist() == [[1 + 2.0**-9, 0.0]]
    assert normed.tolist() == [[pytest.approx(2**0.5, rel=2**-8), 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_equals_reference(ops: Operators[Any], dtype: torch.dtype) -> None:
    """The first half is the gate; gates where the exponential overflows give 0 or themselves, never NaN."""
    gate_up_TF = random_rows(7, 192, dtype=dtype)
    assert_close(ops.silu_mul(gate_up_TF), REFERENCE.silu_mul(gate_up_TF))


def test_reference_silu_mul_by_hand() -> None:
    """silu(0) = 0, silu of something large is itself, of something very negative 0."""
    gate_up = torch.tensor([[0.0, 200.0, -200.0, 5.0, 3.0, 3.0]])
    assert REFERENCE.silu_mul(gate_up).tolist() == [[0.0, 600.0, 0.0]]
