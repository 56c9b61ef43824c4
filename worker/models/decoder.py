"""The decoder of the Llama, Mistral, Qwen and Gemma families. MHA, GQA and MQA are the same code.

Dimensions: T tokens of the flattened batch, E hidden size, H query heads, K KV heads, D head size, F feed-forward
size, V vocabulary, N blocks, L layers of a block, P tokens per block. H, K, F are this rank's; V this rank's rows.

What may not go in here: requests, scheduling, sampling. A step enters as token ids, positions and attention plans, one
for each group of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pagoda.kernels.interface import AttentionKind, AttentionWeights, FeedForwardWeights, Operators
from pagoda.kernels.rope import RopeConfig, cos_sin, inverse_frequencies
from pagoda.worker.models.config import LayerConfig, ModelConfig
from pagoda.worker.parallel import SINGLE, TPContext


class RMSNorm(nn.Module):
    """The weight of a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def scale(self, config: ModelConfig) -> torch.Tensor:
        """What normalised numbers are multiplied with, in float32."""
        return self.weight.float() + config.norm_offset


def _scale(norm: RMSNorm | None, config: ModelConfig) -> torch.Tensor | None:
    return None if norm is None else norm.scale(config)


class Linear(nn.Module):
    """A weight and perhaps a bias, where several checkpoint matrices may be fused along the output."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None


class Attention(nn.Module):
    """The parameters of a layer's first half, with a fused QKV projection."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, has_output_bias: bool) -> None:
        super().__init__()
        num_qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
        self.layer = layer
        self.norm = RMSNorm(config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, num_qkv, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_size, config.hidden_size, bias=has_output_bias)
        self.q_norm = RMSNorm(config.head_size) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size) if config.qk_norm else None
        self.output_norm = RMSNorm(config.hidden_size) if config.has_output_norms else None

    def packed(self, config: ModelConfig, ops: Operators[Any, Any]) -> AttentionWeights[Any]:
        """As the operators want it."""
        return AttentionWeights(
            norm_E=self.norm.scale(config),
            qkv=ops.pack(self.qkv_proj.weight, self.qkv_proj.bias),
            q_norm_D=_scale(self.q_norm, config),
            k_norm_D=_scale(self.k_norm, config),
            output=ops.pack(self.o_proj.weight, self.o_proj.bias),
            num_heads=config.num_heads,
            kind=AttentionKind(
                scale=config.attention_scale, window=self.layer.window, soft_cap=config.attention_soft_cap
            ),
            eps=config.rms_norm_eps,
        )


class FeedForward(nn.Module):
    """The parameters of a layer's second half, gate and up projection fused."""

    def __init__(self, config: ModelConfig, *, has_output_bias: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=has_output_bias)
        self.output_norm = RMSNorm(config.hidden_size) if config.has_output_norms else None

    def packed(self, config: ModelConfig, ops: Operators[Any, Any]) -> FeedForwardWeights[Any]:
        """As the operators want it."""
        return FeedForwardWeights(
            norm_E=self.norm.scale(config),
            gate_up=ops.pack_gated(self.gate_up_proj.weight, self.gate_up_proj.bias, config.activation),
            down=ops.pack(self.down_proj.weight, self.down_proj.bias),
            eps=config.rms_norm_eps,
        )


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, is_first_rank: bool) -> None:
        super().__init__()
        # What all ranks' parts are summed into gets its bias once.
        self.attention = Attention(config, layer, has_output_bias=config.output_bias and is_first_rank)
        self.mlp = FeedForward(config, has_output_bias=config.mlp_bias and is_first_rank)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer as the operators want it, and where its KV is."""

    attention: AttentionWeights[Any]
    attention_output_norm_E: torch.Tensor | None
    mlp: FeedForwardWeights[Any]
    mlp_output_norm_E: torch.Tensor | None
    rope: RopeConfig
    group: int
    index: int
    """Which of the layers of its group's blocks it is."""


class Decoder(nn.Module):
    """A decoder with its output head, or one rank's shard of it."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Operators[Any, Any],
        places: Sequence[tuple[int, int]] | None = None,
        context: TPContext = SINGLE,
    ) -> None:
        """`config` is the whole model's; `places` are a `KVCacheSpec`'s: without, all layers are of one group."""
        super().__init__()
        self.config = config
        self.ops = ops
        self.context = context
        self.local = config.on_one_of(context.size)
        self._places = places or [(0, layer) for layer in range(config.num_layers)]
        # Equally many rows on every rank: the last ones may have some that stand for no token.
        num_rows = -(-config.vocab_size // context.size)
        self.embedding = nn.Parameter(torch.zeros(num_rows, config.hidden_size), requires_grad=False)
        is_first_rank = context.rank == 0
        self.layers = nn.ModuleList(
            DecoderLayer(self.local, layer, is_first_rank=is_first_rank) for layer in config.layers
        )
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.zeros(num_rows, config.hidden_size), requires_grad=False)
        self.packed_layers: list[PackedLayer] = []
        self.packed_head: Any = None
        self.norm_scale_E = torch.empty(0)
        self.inverse_frequencies: dict[RopeConfig, torch.Tensor] = {}

    def prepare(self) -> None:
        """Call once after the weights are loaded and on their device. Only what the operators make of them is kept."""
        local, ops = self.local, self.ops
        for rope in {layer.rope for layer in local.layers}:
            self.inverse_frequencies[rope] = inverse_frequencies(rope, local.head_size).to(self.embedding.device)
        for group, index in self._places:  # one layer after the other, so that little is there twice
            layer = self.layers.pop(0)
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.attention, layer.mlp
            self.packed_layers.append(
                PackedLayer(
                    attention=attention.packed(local, ops),
                    attention_output_norm_E=_scale(attention.output_norm, local),
                    mlp=mlp.packed(local, ops),
                    mlp_output_norm_E=_scale(mlp.output_norm, local),
                    rope=attention.layer.rope,
                    group=group,
                    index=index,
                )
            )
        self.norm_scale_E = self.norm.scale(local)
        # A head that is the embedding is there twice then: in rows to look up, and packed to multiply.
        self.packed_head = ops.pack(self.embedding if self.lm_head is None else self.lm_head, None)
        self.lm_head = None

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache_NL2PKD: torch.Tensor,
        plans: Sequence[object],
    ) -> torch.Tensor:
        """Run the layers, writing the tokens' KV into the cache (mutated). `plans` are one for each group.

        Returns hidden states, TE, the same on every rank.
        """
        ops, all_reduce, eps = self.ops, self.context.all_reduce, self.config.rms_norm_eps
        angles = {rope: cos_sin(positions_T, frequencies) for rope, frequencies in self.inverse_frequencies.items()}
        caches = cache_NL2PKD.unbind(1)
        x_TE = self._embed(token_ids_T)
        residual_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for layer in self.packed_layers:
            cache_N2PKD, (cos_TD, sin_TD) = caches[layer.index], angles[layer.rope]
            plan = plans[layer.group]
            x_TE = all_reduce(
                ops.attention_block(x_TE, residual_TE, layer.attention, cos_TD, sin_TD, cache_N2PKD, plan)
            )
            if layer.attention_output_norm_E is not None:
                x_TE = ops.rms_norm(x_TE, layer.attention_output_norm_E, eps)
            x_TE = all_reduce(ops.feed_forward_block(x_TE, residual_TE, layer.mlp))
            if layer.mlp_output_norm_E is not None:
                x_TE = ops.rms_norm(x_TE, layer.mlp_output_norm_E, eps)
        return ops.add_rms_norm(x_TE, residual_TE, self.norm_scale_E, eps)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """Next-token logits of the whole vocabulary, BV, float32; on every rank."""
        logits_BV = self.context.gather_columns(self.ops.linear_float32(hidden_BE, self.packed_head))
        logits_BV = logits_BV[:, : self.config.vocab_size]
        if cap := self.config.logit_soft_cap:
            logits_BV = torch.tanh(logits_BV / cap) * cap
        return logits_BV.contiguous()

    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """TE, on every rank: each looks up the tokens whose rows it has."""
        if self.context.size == 1:
            x_TE = F.embedding(token_ids_T, self.embedding)
        else:
            start, end = self.context.split(self.config.vocab_size)
            is_here_T = (token_ids_T >= start) & (token_ids_T < end)
            x_TE = F.embedding((token_ids_T - start) * is_here_T, self.embedding) * is_here_T[:, None]
            x_TE = self.context.all_reduce(x_TE)
        if self.config.embedding_scale != 1.0:
            # Rounded to the weights' type, as the models were trained with.
            x_TE *= torch.tensor(self.config.embedding_scale, dtype=x_TE.dtype, device=x_TE.device)
        return x_TE
