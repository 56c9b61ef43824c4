"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM2. MHA, GQA and MQA are the same code.

Dimensions: T tokens of the flattened batch, E hidden size, H query heads, K KV heads, D head size, F feed-forward
size, V vocabulary, N blocks, L layers, P tokens per block.

What may not go in here: requests, scheduling, sampling. A step enters as token ids, positions and an attention plan.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pagoda.kernels.interface import Operators
from pagoda.kernels.rope import cos_sin, inverse_frequencies
from pagoda.worker.models.config import ModelConfig


class RMSNorm(nn.Module):
    """The weight of a norm; the operators apply it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps


class Linear(nn.Module):
    """x @ weight.T + bias, where several checkpoint matrices may be fused along the output."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Attention over the paged cache, with a fused QKV projection."""

    def __init__(self, config: ModelConfig, ops: Operators[Any]) -> None:
        super().__init__()
        self.ops = ops
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        num_qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        self.qkv_proj = Linear(config.hidden_size, num_qkv, bias=config.qkv_bias)
        self.o_proj = Linear(self.num_heads * self.head_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_size, config.rms_norm_eps) if config.qk_norm else None
        self.scale = self.head_size**-0.5

    def forward(
        self, x_TE: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: object
    ) -> torch.Tensor:
        qkv_TXD = self.qkv_proj(x_TE).view(len(x_TE), -1, self.head_size)
        q_THD, k_TKD, v_TKD = qkv_TXD.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD = self.ops.rms_norm(q_THD, self.q_norm.weight, self.q_norm.eps)
            k_TKD = self.ops.rms_norm(k_TKD, self.k_norm.weight, self.k_norm.eps)
        q_THD = self.ops.rope_kv_write(q_THD, k_TKD, v_TKD, cos_TD, sin_TD, cache_N2PKD, plan)
        out_THD = self.ops.attend(q_THD, cache_N2PKD, plan, self.scale)
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, ops: Operators[Any]) -> None:
        super().__init__()
        self.ops = ops
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, ops)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (what to add to the residual stream, the residual stream)."""
        x_TE, residual_TE = self.ops.add_rms_norm(x_TE, residual_TE, self.input_norm.weight, self.input_norm.eps)
        x_TE = self.attention(x_TE, cos_TD, sin_TD, cache_N2PKD, plan)
        x_TE, residual_TE = self.ops.add_rms_norm(x_TE, residual_TE, self.mlp_norm.weight, self.mlp_norm.eps)
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x_TE))), residual_TE


class LlamaModel(nn.Module):
    """A decoder with its output head."""

    def __init__(self, config: ModelConfig, ops: Operators[Any]) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(config, ops) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.inverse_frequencies_D2 = torch.empty(0)

    def prepare(self) -> None:
        """Call once after the weights are loaded and on their device."""
        frequencies = inverse_frequencies(self.config.rope, self.config.head_size)
        self.inverse_frequencies_D2 = frequencies.to(self.embedding.device)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, cache_NL2PKD: torch.Tensor, plan: object
    ) -> torch.Tensor:
        """Run the layers, writing the tokens' KV into the cache (mutated). Returns hidden states, TE."""
        cos_TD, sin_TD = cos_sin(positions_T, self.inverse_frequencies_D2)
        x_TE = F.embedding(token_ids_T, self.embedding)
        residual_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for index, layer in enumerate(self.layers):
            x_TE, residual_TE = layer(x_TE, residual_TE, cos_TD, sin_TD, cache_NL2PKD[:, index], plan)
        x_TE, _ = self.ops.add_rms_norm(x_TE, residual_TE, self.norm.weight, self.norm.eps)
        return x_TE

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """Next-token logits, BV, in the model's dtype."""
        return F.linear(hidden_BE, self.embedding if self.lm_head is None else self.lm_head)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the view of this model's parameters that it fills."""
        config = self.config
        names: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if self.lm_head is not None:
            names["lm_head.weight"] = self.lm_head
        q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            attention, prefix = layer.attention, f"model.layers.{index}."
            names[prefix + "input_layernorm.weight"] = layer.input_norm.weight
            names[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.weight
            if attention.q_norm is not None and attention.k_norm is not None:
                names[prefix + "self_attn.q_norm.weight"] = attention.q_norm.weight
                names[prefix + "self_attn.k_norm.weight"] = attention.k_norm.weight
            for kind in ("weight", "bias"):
                linears = {
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): (
                        getattr(attention.qkv_proj, kind),
                        (q_size, kv_size, kv_size),
                    ),
                    ("self_attn.o_proj",): (getattr(attention.o_proj, kind), (config.hidden_size,)),
                    ("mlp.gate_proj", "mlp.up_proj"): (
                        getattr(layer.gate_up_proj, kind),
                        (config.intermediate_size, config.intermediate_size),
                    ),
                    ("mlp.down_proj",): (getattr(layer.down_proj, kind), (config.hidden_size,)),
                }
                for parts, (parameter, sizes) in linears.items():
                    if parameter is not None:
                        for part, view in zip(parts, parameter.split(sizes), strict=True):
                            names[f"{prefix}{part}.{kind}"] = view
        return names
