"""The two halves of a layer, fused or not, against the single operators of the reference."""

from typing import Any

import pytest
import torch
from paged import DTYPES, HEADS, LAYER, MIXES, REFERENCE, P, lay_out, random_contexts

from pagoda.kernels.interface import AttentionKind, AttentionWeights, FeedForwardWeights, Operators

HIDDEN = 40
# Several operators in a row: each rounds its result to 2**-9 of its size in bfloat16.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-5, "atol": 2**-5}}


def numbers(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["plain", "qk norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_block_equals_reference(
    ops: Operators[Any, Any], heads: tuple[int, int, int], dtype: torch.dtype, has_qk_norm: bool
) -> None:
    num_heads, num_kv_heads, head_size = heads
    num_qkv = (num_heads + 2 * num_kv_heads) * head_size
    paged = lay_out(random_contexts(MIXES["decode and prefill"], heads, dtype))
    num_tokens = len(paged.batch.slot_mapping_T)
    angles_TD = 7 * torch.rand(num_tokens, head_size // 2).repeat(1, 2)

    def run(backend: Operators[Any, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = AttentionWeights(
            norm_E=numbers(HIDDEN, dtype=dtype, seed=1),
            qkv=backend.pack(
                numbers(num_qkv, HIDDEN, dtype=dtype, seed=2, scale=HIDDEN**-0.5), numbers(num_qkv, dtype=dtype, seed=3)
            ),
            q_norm_D=numbers(head_size, dtype=dtype, seed=4) if has_qk_norm else None,
            k_norm_D=numbers(head_size, dtype=dtype, seed=5) if has_qk_norm else None,
            output=backend.pack(
                numbers(HIDDEN, num_heads * head_size, dtype=dtype, seed=6, scale=(num_heads * head_size) ** -0.5),
                None,
            ),
            num_heads=num_heads,
            kind=AttentionKind(scale=head_size**-0.5),
            eps=1e-5,
        )
        x_TE, residual_TE = numbers(num_tokens, HIDDEN, dtype=dtype, seed=7), torch.ones(num_tokens, HIDDEN)
        cache_NL2PKD = paged.cache_NL2PKD.clone()
        plan = backend.plan(paged.batch, P, dtype)
        out_TE = backend.attention_block(
            x_TE, residual_TE, weights, angles_TD.cos(), angles_TD.sin(), cache_NL2PKD[:, LAYER], plan
        )
        return out_TE, residual_TE, cache_NL2PKD

    for actual, expected in zip(run(ops), run(REFERENCE), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feed_forward_block_equals_reference(ops: Operators[Any, Any], dtype: torch.dtype) -> None:
    def run(backend: Operators[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        weights = FeedForwardWeights(
            norm_E=numbers(HIDDEN, dtype=dtype, seed=1),
            gate_up=backend.pack_gated(numbers(2 * 72, HIDDEN, dtype=dtype, seed=2, scale=0.2), None, "silu"),
            down=backend.pack(
                numbers(HIDDEN, 72, dtype=dtype, seed=3, scale=0.1), numbers(HIDDEN, dtype=dtype, seed=4)
            ),
            eps=1e-5,
        )
        x_TE, residual_TE = numbers(21, HIDDEN, dtype=dtype, seed=5), torch.ones(21, HIDDEN)
        return backend.feed_forward_block(x_TE, residual_TE, weights), residual_TE

    for actual, expected in zip(run(ops), run(REFERENCE), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])
