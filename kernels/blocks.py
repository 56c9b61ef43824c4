"""The two halves of a decoder layer, out of single operators: for backends that do no better by fusing them.

Dimensions as in `interface.py`.
"""

from typing import Any

import torch

from pagoda.kernels.interface import AttentionWeights, FeedForwardWeights, Operators


def attention_block(
    ops: Operators[Any, Any],
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weights: AttentionWeights[Any],
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    cache_N2PKD: torch.Tensor,
    plan: Any,
) -> torch.Tensor:
    """`Operators.attention_block`."""
    x_TE = ops.add_rms_norm(x_TE, residual_TE, weights.norm_E, weights.eps)
    qkv_TXD = ops.linear(x_TE, weights.qkv).view(len(x_TE), -1, cache_N2PKD.shape[-1])
    num_kv_heads = cache_N2PKD.shape[-2]
    q_THD, k_TKD, v_TKD = torch.split(qkv_TXD, [weights.num_heads, num_kv_heads, num_kv_heads], dim=1)
    if weights.q_norm_D is not None:
        q_THD = ops.rms_norm(q_THD, weights.q_norm_D, weights.eps)
    if weights.k_norm_D is not None:
        k_TKD = ops.rms_norm(k_TKD, weights.k_norm_D, weights.eps)
    q_THD = ops.rope_kv_write(q_THD, k_TKD, v_TKD, cos_TD, sin_TD, cache_N2PKD, plan)
    out_THD = ops.attend(q_THD, cache_N2PKD, plan, weights.kind)
    return ops.linear(out_THD.flatten(1), weights.output)


def feed_forward_block(
    ops: Operators[Any, Any], x_TE: torch.Tensor, residual_TE: torch.Tensor, weights: FeedForwardWeights[Any]
) -> torch.Tensor:
    """`Operators.feed_forward_block`."""
    x_TE = ops.add_rms_norm(x_TE, residual_TE, weights.norm_E, weights.eps)
    return ops.linear(ops.gated_linear(x_TE, weights.gate_up), weights.down)
