"""Which tensors of a checkpoint a decoder's parameters are, and which part of them one rank holds."""

from dataclasses import dataclass

from pagoda.worker.models.decoder import Decoder, DecoderLayer, Linear
from pagoda.worker.weights import Shard


def checkpoint_shards(model: Decoder) -> dict[str, Shard]:
    """Tensor name -> the part of it that the model's rank holds, and where it goes; before `Decoder.prepare`."""
    config, local, rank = model.config, model.local, model.context.rank
    prefix = config.tensor_prefix
    start, end = model.context.split(config.vocab_size)
    shape = (config.vocab_size, config.hidden_size)
    shards = {
        f"{prefix}embed_tokens.weight": Shard(model.embedding[: end - start], shape, start=start),
        f"{prefix}norm.weight": Shard.whole(model.norm.weight),
    }
    if model.lm_head is not None:
        name = prefix.removesuffix("model.") + "lm_head.weight"
        shards[name] = Shard(model.lm_head[: end - start], shape, start=start)
    heads = _Rows(config.num_heads * config.head_size, local.num_heads * config.head_size * rank)
    # With fewer KV heads than ranks, several ranks hold the same one.
    first_kv_head = rank * config.num_kv_heads // model.context.size
    kv_heads = _Rows(config.num_kv_heads * config.head_size, first_kv_head * config.head_size)
    columns = _Rows(config.intermediate_size, local.intermediate_size * rank)
    q_size, kv_size = local.num_heads * config.head_size, local.num_kv_heads * config.head_size
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        attention, mlp, name = layer.attention, layer.mlp, f"{prefix}layers.{index}."
        qkv, gate_up = attention.qkv_proj, mlp.gate_up_proj
        parts = zip("qkv", (heads, kv_heads, kv_heads), (q_size, kv_size, kv_size), strict=True)
        offset = 0
        for letter, rows, size in parts:
            shards |= rows.of(f"{name}self_attn.{letter}_proj", qkv, offset, size)
            offset += size
        for half, part in enumerate(("gate", "up")):
            size = local.intermediate_size
            shards |= columns.of(f"{name}mlp.{part}_proj", gate_up, half * size, size)
        shards |= heads.into(f"{name}self_attn.o_proj", attention.o_proj, has_bias=config.output_bias)
        shards |= columns.into(f"{name}mlp.down_proj", mlp.down_proj, has_bias=config.mlp_bias)
        norms = {
            "input_layernorm": attention.norm,
            "self_attn.q_norm": attention.q_norm,
            "self_attn.k_norm": attention.k_norm,
        }
        if config.has_output_norms:
            norms |= {
                "post_attention_layernorm": attention.output_norm,
                "pre_feedforward_layernorm": mlp.norm,
                "post_feedforward_layernorm": mlp.output_norm,
            }
        else:
            norms["post_attention_layernorm"] = mlp.norm
        shards |= {f"{name}{key}.weight": Shard.whole(norm.weight) for key, norm in norms.items() if norm is not None}
    return shards


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of a dimension of `full` numbers, a rank holds some from `start` on."""

    full: int
    start: int

    def of(self, name: str, linear: Linear, offset: int, size: int) -> dict[str, Shard]:
        """The shards of a projection whose outputs are split: into rows `offset` and on of a fused one."""
        rows = slice(offset, offset + size)
        shards = {f"{name}.weight": Shard(linear.weight[rows], (self.full, linear.weight.shape[1]), start=self.start)}
        if linear.bias is not None:
            shards[f"{name}.bias"] = Shard(linear.bias[rows], (self.full,), start=self.start)
        return shards

    def into(self, name: str, linear: Linear, *, has_bias: bool) -> dict[str, Shard]:
        """The shards of a projection whose inputs are split. Of its bias the first rank has all, the others nothing."""
        shape = (linear.weight.shape[0], self.full)
        shards = {f"{name}.weight": Shard(linear.weight, shape, dim=1, start=self.start)}
        if has_bias:
            num_out = linear.weight.shape[0]
            nothing = Shard(linear.weight.new_empty(0), (num_out,), start=num_out)
            shards[f"{name}.bias"] = nothing if linear.bias is None else Shard.whole(linear.bias)
        return shards
