"""What goes into the cache: rotated keys, values, whole blocks; and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged import (
    BACKENDS,
    DTYPES,
    HEADS,
    LAYER,
    MIXES,
    NUM_LAYERS,
    REFERENCE,
    P,
    assert_close,
    lay_out,
    random_contexts,
)

from pagoda.kernels.interface import AttentionBatch, Operators


@dataclass(frozen=True, slots=True)
class Write:
    """Arguments of `rope_kv_write` for the queries of `MIXES["decode and prefill"]`, into a pool of NaN."""

    qkv_TXD: torch.Tensor
    heads: tuple[int, int, int]
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    cache_NL2PKD: torch.Tensor
    batch: AttentionBatch

    def apply(self, ops: Operators[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rotated queries, the pool afterwards); this object stays as it is."""
        cache_NL2PKD = self.cache_NL2PKD.clone()
        num_heads, num_kv_heads, _ = self.heads
        # Views of one fused projection, as in the model.
        q_THD, k_TKD, v_TKD = self.qkv_TXD.clone().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        plan = ops.plan(self.batch, P, q_THD.dtype)
        out_THD = ops.rope_kv_write(q_THD, k_TKD, v_TKD, self.cos_TD, self.sin_TD, cache_NL2PKD[:, LAYER], plan)
        return out_THD, cache_NL2PKD


def random_write(heads: tuple[int, int, int], dtype: torch.dtype, *, skipped: Sequence[int] = ()) -> Write:
    """`skipped` tokens have slot -1."""
    num_heads, num_kv_heads, head_size = heads
    paged = lay_out(random_contexts(MIXES["decode and prefill"], heads, dtype))
    batch = paged.batch
    batch.slot_mapping_T[list(skipped)] = -1
    generator = torch.Generator().manual_seed(1)
    num_tokens = len(batch.slot_mapping_T)
    qkv_TXD = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, generator=generator).to(dtype)
    angles_TD = 7 * torch.rand(num_tokens, head_size // 2, generator=generator).repeat(1, 2)
    poison_NL2PKD = torch.full_like(paged.cache_NL2PKD, float("nan"))
    return Write(qkv_TXD, heads, angles_TD.cos(), angles_TD.sin(), poison_NL2PKD, batch)


@pytest.mark.parametrize("skipped", [(), (0, 2, 7, 20)], ids=["all", "some skipped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, (3, 1, 6)], ids=str)
def test_rope_kv_write_equals_reference(
    ops: Operators[Any, Any], heads: tuple[int, int, int], dtype: torch.dtype, skipped: tuple[int, ...]
) -> None:
    """Rotated queries, and the whole pool: what neither wrote is NaN in both."""
    write = random_write(heads, dtype, skipped=skipped)
    (actual_THD, actual_NL2PKD), (expected_THD, expected_NL2PKD) = write.apply(ops), write.apply(REFERENCE)
    assert_close(actual_THD, expected_THD)
    assert_close(actual_NL2PKD, expected_NL2PKD, equal_nan=True)


@pytest.mark.parametrize("skipped", [(), (0, 2, 7, 20), range(28)], ids=["all", "some skipped", "none"])
@pytest.mark.parametrize("backend", [REFERENCE, *BACKENDS], ids=lambda backend: backend.name)
def test_only_the_slots_of_a_step_are_written(backend: Operators[Any, Any], skipped: Sequence[int]) -> None:
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


def random_pool() -> torch.Tensor:
    """Eight blocks whose last slots are not written yet."""
    cache_NL2PKD = torch.randn(8, NUM_LAYERS, 2, P, 3, 16, generator=torch.Generator().manual_seed(0))
    cache_NL2PKD[:, :, :, P - 1] = float("nan")
    return cache_NL2PKD


@pytest.mark.parametrize(
    "pairs", [[], [(2, 5)], [(0, 1), (3, 2), (6, 7)], [(4, 0), (4, 6)]], ids=["none", "one", "some", "one source"]
)
@pytest.mark.parametrize("backend", [REFERENCE, *BACKENDS], ids=lambda backend: backend.name)
def test_copy_blocks_copies_whole_blocks_and_nothing_else(
    backend: Operators[Any, Any], pairs: list[tuple[int, int]]
) -> None:
    """All layers, keys and values; slots not written yet are copied as they are."""
    cache_NL2PKD = random_pool()
    sources = list(range(8))
    for source, destination in pairs:
        sources[destination] = source
    expected_NL2PKD = cache_NL2PKD[sources]
    backend.copy_blocks(cache_NL2PKD, pairs)
    assert torch.equal(cache_NL2PKD.nan_to_num(9.0), expected_NL2PKD.nan_to_num(9.0))


@pytest.mark.parametrize("block_ids", [[], [3], [5, 0, 7]], ids=["none", "one", "some"])
@pytest.mark.parametrize("backend", [REFERENCE, *BACKENDS], ids=lambda backend: backend.name)
def test_gathered_blocks_come_back_where_they_are_scattered(backend: Operators[Any, Any], block_ids: list[int]) -> None:
    """Gathered from one pool and scattered into another, elsewhere: each is there whole, all else is untouched."""
    source_NL2PKD, destination_NL2PKD = random_pool(), random_pool().neg()
    expected_NL2PKD = destination_NL2PKD.clone()
    places = [7 - block_id for block_id in block_ids]
    for block_id, place in zip(block_ids, places, strict=True):
        expected_NL2PKD[place] = source_NL2PKD[block_id]
    blocks = backend.gather_blocks(source_NL2PKD, block_ids)
    assert blocks.is_contiguous()
    backend.scatter_blocks(destination_NL2PKD, places, blocks)
    assert torch.equal(destination_NL2PKD.nan_to_num(9.0), expected_NL2PKD.nan_to_num(9.0))
