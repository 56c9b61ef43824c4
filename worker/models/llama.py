"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM2. MHA, GQA and MQA are the same code.

Dimensions: T tokens of the flattened batch, E hidden size, H query heads, K KV heads, D head size, F feed-forward
size, V vocabulary, N blocks, L layers, P tokens per block.

What may not go in here: requests, scheduling, sampling. A step enters as token ids, positions and an attention plan.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pagoda.kernels.interface import AttentionKind, AttentionWeights, FeedForwardWeights, Operators
from pagoda.kernels.rope import cos_sin, inverse_frequencies
from pagoda.worker.models.config import ModelConfig


class RMSNorm(nn.Module):
    """The weight of a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)


class Linear(nn.Module):
    """A weight and perhaps a bias, where several checkpoint matrices may be fused along the output."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None


class Attention(nn.Module):
    """The parameters of a layer's first half, with a fused QKV projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
        self.norm = RMSNorm(config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, num_qkv, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_size) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size) if config.qk_norm else None

    def packed(self, config: ModelConfig, ops: Operators[Any, Any]) -> AttentionWeights[Any]:
        """As the operators want it."""
        return AttentionWeights(
            norm_E=self.norm.weight,
            qkv=ops.pack(self.qkv_proj.weight, self.qkv_proj.bias),
            q_norm_D=None if self.q_norm is None else self.q_norm.weight,
            k_norm_D=None if self.k_norm is None else self.k_norm.weight,
            output=ops.pack(self.o_proj.weight, self.o_proj.bias),
            num_heads=config.num_heads,
            kind=AttentionKind(scale=config.head_size**-0.5),
            eps=config.rms_norm_eps,
        )


class FeedForward(nn.Module):
    """The parameters of a layer's second half, gate and up projection fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def packed(self, config: ModelConfig, ops: Operators[Any, Any]) -> FeedForwardWeights[Any]:
        """As the operators want it."""
        return FeedForwardWeights(
            norm_E=self.norm.weight,
            gate_up=ops.pack_gated(self.gate_up_proj.weight, self.gate_up_proj.bias, "silu"),
            down=ops.pack(self.down_proj.weight, self.down_proj.bias),
            eps=config.rms_norm_eps,
        )


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = FeedForward(config)


class LlamaModel(nn.Module):
    """A decoder with its output head."""

    def __init__(self, config: ModelConfig, ops: Operators[Any, Any]) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.inverse_frequencies_D2 = torch.empty(0)
        self.packed_layers: list[tuple[AttentionWeights[Any], FeedForwardWeights[Any]]] = []
        self.packed_head: Any = None

    def prepare(self) -> None:
        """Call once after the weights are loaded and on their device. Only what the operators make of them is kept."""
        config = self.config
        self.inverse_frequencies_D2 = inverse_frequencies(config.rope, config.head_size).to(self.embedding.device)
        while self.layers:  # one after the other, so that little is there twice
            layer = self.layers.pop(0)
            assert isinstance(layer, DecoderLayer)
            self.packed_layers.append((layer.attention.packed(config, self.ops), layer.mlp.packed(config, self.ops)))
        # A head that is the embedding is there twice then: in rows to look up, and packed to multiply.
        self.packed_head = self.ops.pack(self.embedding if self.lm_head is None else self.lm_head, None)
        self.lm_head = None

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, cache_NL2PKD: torch.Tensor, plan: object
    ) -> torch.Tensor:
        """Run the layers, writing the tokens' KV into the cache (mutated). Returns hidden states, TE."""
        ops = self.ops
        cos_TD, sin_TD = cos_sin(positions_T, self.inverse_frequencies_D2)
        x_TE = F.embedding(token_ids_T, self.embedding)
        residual_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for (attention, mlp), cache_N2PKD in zip(self.packed_layers, cache_NL2PKD.unbind(1), strict=True):
            x_TE = ops.attention_block(x_TE, residual_TE, attention, cos_TD, sin_TD, cache_N2PKD, plan)
            x_TE = ops.feed_forward_block(x_TE, residual_TE, mlp)
        return ops.add_rms_norm(x_TE, residual_TE, self.norm.weight, self.config.rms_norm_eps)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """Next-token logits, BV, float32."""
        return self.ops.linear_float32(hidden_BE, self.packed_head)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the view of this model's parameters that it fills; before `prepare`."""
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
            attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{index}."
            names[prefix + "input_layernorm.weight"] = attention.norm.weight
            names[prefix + "post_attention_layernorm.weight"] = mlp.norm.weight
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
                        getattr(mlp.gate_up_proj, kind),
                        (config.intermediate_size, config.intermediate_size),
                    ),
                    ("mlp.down_proj",): (getattr(mlp.down_proj, kind), (config.hidden_size,)),
                }
                for parts, (parameter, sizes) in linears.items():
                    if parameter is not None:
                        for part, view in zip(parts, parameter.split(sizes), strict=True):
                            names[f"{prefix}{part}.{kind}"] = view
        return names
