"""The two halves of a layer, fused or not, against the single operators of the reference."""

import os
from typing import Any

import pytest
import torch
from paged import DTYPES, HEADS, LAYER, MIXES, REFERENCE, P, lay_out, random_contexts

from pagoda.kernels.cpu.build import library, supported_instruction_sets
from pagoda.kernels.cpu.library import load
from pagoda.kernels.cpu.operators import CpuOperators
from pagoda.kernels.interface import AttentionKind, AttentionWeights, FeedForwardWeights, Operators

HIDDEN = 40
# Several operators in a row: each rounds its result to 2**-9 of its size in bfloat16.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-5, "atol": 2**-5}}


def numbers(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("hidden", [HIDDEN, 41])
@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["plain", "qk norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_block_equals_reference(
    ops: Operators[Any, Any], heads: tuple[int, int, int], dtype: torch.dtype, has_qk_norm: bool, hidden: int
) -> None:
    num_heads, num_kv_heads, head_size = heads
    num_qkv = (num_heads + 2 * num_kv_heads) * head_size
    paged = lay_out(random_contexts(MIXES["decode and prefill"], heads, dtype))
    num_tokens = len(paged.batch.slot_mapping_T)
    angles_TD = 7 * torch.rand(num_tokens, head_size // 2).repeat(1, 2)

    def run(backend: Operators[Any, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = AttentionWeights(
            norm_E=numbers(hidden, dtype=torch.float32, seed=1),
            qkv=backend.pack(
                numbers(num_qkv, hidden, dtype=dtype, seed=2, scale=hidden**-0.5), numbers(num_qkv, dtype=dtype, seed=3)
            ),
            q_norm_D=numbers(head_size, dtype=torch.float32, seed=4) if has_qk_norm else None,
            k_norm_D=numbers(head_size, dtype=torch.float32, seed=5) if has_qk_norm else None,
            output=backend.pack(
                numbers(hidden, num_heads * head_size, dtype=dtype, seed=6, scale=(num_heads * head_size) ** -0.5),
                None,
            ),
            num_heads=num_heads,
            kind=AttentionKind(scale=head_size**-0.5),
            eps=1e-5,
        )
        x_TE, residual_TE = numbers(num_tokens, hidden, dtype=dtype, seed=7), torch.ones(num_tokens, hidden)
        cache_NL2PKD = paged.cache_NL2PKD.clone()
        plan = backend.plan(paged.batch, P, dtype)
        out_TE = backend.attention_block(
            x_TE, residual_TE, weights, angles_TD.cos(), angles_TD.sin(), cache_NL2PKD[:, LAYER], plan
        )
        return out_TE, residual_TE, cache_NL2PKD

    for actual, expected in zip(run(ops), run(REFERENCE), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE[dtype], equal_nan=True)


def feed_forward_weights(
    backend: Operators[Any, Any], dtype: torch.dtype, size: int, hidden: int = HIDDEN
) -> FeedForwardWeights[Any]:
    return FeedForwardWeights(
        norm_E=numbers(hidden, dtype=torch.float32, seed=1),
        gate_up=backend.pack_gated(numbers(2 * size, hidden, dtype=dtype, seed=2, scale=0.2), None, "silu"),
        down=backend.pack(numbers(hidden, size, dtype=dtype, seed=3, scale=0.1), numbers(hidden, dtype=dtype, seed=4)),
        eps=1e-5,
    )


@pytest.mark.parametrize(("size", "hidden"), [(72, HIDDEN), (73, HIDDEN), (72, 41), (7, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feed_forward_block_equals_reference(
    ops: Operators[Any, Any], dtype: torch.dtype, size: int, hidden: int
) -> None:
    """Sizes that are odd, as in no model that we know, too: pairs of bfloat16 are what is multiplied."""

    def run(backend: Operators[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        weights = feed_forward_weights(backend, dtype, size, hidden)
        x_TE, residual_TE = numbers(21, hidden, dtype=dtype, seed=5), torch.ones(21, hidden)
        return backend.feed_forward_block(x_TE, residual_TE, weights), residual_TE

    for actual, expected in zip(run(ops), run(REFERENCE), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])


def test_block_after_a_product_of_its_weights(ops: Operators[Any, Any]) -> None:
    """Whose result stays what it was."""
    weights = feed_forward_weights(ops, torch.float32, 72)
    x_TF = numbers(21, 72, dtype=torch.float32, seed=6)

    def block() -> torch.Tensor:
        x_TE = numbers(21, HIDDEN, dtype=torch.float32, seed=5)
        return ops.feed_forward_block(x_TE, torch.ones(21, HIDDEN), weights)

    before_TE, product_TE = block(), ops.linear_float32(x_TF, weights.down)
    kept_TE = product_TE.clone()
    assert torch.equal(block(), before_TE)
    assert torch.equal(product_TE, kept_TE)


def test_threads_that_lose_their_cores_lose_no_work() -> None:
    """Scenario: more threads than cores, so that most are put off in the midst of a block or come when it is over.

    Whoever computes, every number is computed once, in the same way, before the next part begins: the same bits.
    """
    functions = load(library(supported_instruction_sets()[0]))
    num_threads = 4 * len(os.sched_getaffinity(0)) + 1
    one, many = (CpuOperators(functions, instruction_set="best", num_threads=n) for n in (1, num_threads))
    alone, crowded = (feed_forward_weights(ops, torch.bfloat16, 1000) for ops in (one, many))
    for num_rows in [1, 2, 33, 150] * 50:
        x_TE = numbers(num_rows, HIDDEN, dtype=torch.bfloat16, seed=num_rows)
        expected_TE = one.feed_forward_block(x_TE.clone(), torch.ones(num_rows, HIDDEN), alone)
        assert torch.equal(many.feed_forward_block(x_TE, torch.ones(num_rows, HIDDEN), crowded), expected_TE)
