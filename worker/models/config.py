"""What a decoder is, whatever its `config.json` calls it; `families.py` reads these."""

import json
from dataclasses import asdict, dataclass, replace

from pagoda.kernels.interface import Activation
from pagoda.kernels.rope import RopeConfig
from pagoda.worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What the attention of one layer sees, and how positions turn its heads."""

    window: int
    """Positions that a query sees, its own included; 0: all before it."""
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama, Mistral, Qwen or Gemma family."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    """Longest context the model was made for, tokens."""
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    dtype: str
    """Type of the checkpoint's weights."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised per head (Qwen3, Gemma 3)."""
    eos_token_ids: frozenset[int]
    attention_scale: float
    """Scores are q . k times this."""
    attention_soft_cap: float = 0.0
    """Scores are bounded to this by tanh; 0 leaves them (Gemma 2)."""
    logit_soft_cap: float = 0.0
    """The same for next-token logits."""
    activation: Activation = "silu"
    has_output_norms: bool = False
    """Whether what attention and feed-forward return is normalised before it is added (Gemma 2 and 3)."""
    norm_offset: float = 0.0
    """Added to the weights of norms: Gemma's checkpoints hold them less 1."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it (Gemma: the square root of the hidden size)."""
    tensor_prefix: str = "model."
    """Of the decoder's tensors in the checkpoint."""
    ignored_prefixes: tuple[str, ...] = ()
    """Of tensors that are no part of the decoder, such as an image encoder's."""

    @property
    def rope_text(self) -> str:
        """All that positions do to keys, canonical: a part of what block hashes cover."""
        ropes = list(dict.fromkeys(layer.rope for layer in self.layers))
        if len(ropes) == 1:
            return json.dumps(asdict(ropes[0]), sort_keys=True)
        by_layer = [ropes.index(layer.rope) for layer in self.layers]
        return json.dumps({"ropes": [asdict(rope) for rope in ropes], "layers": by_layer}, sort_keys=True)

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """How many ranks can share the model: query heads and feed-forward evenly, KV heads evenly or copied."""
        return tuple(size for size in range(1, self.num_heads + 1) if self._problem_with_ranks(size) is None)

    def on_one_of(self, num_ranks: int) -> "ModelConfig":
        """The sizes that one of so many ranks holds of attention and feed-forward. Raises `ConfigError`."""
        if (problem := self._problem_with_ranks(num_ranks)) is not None:
            allowed = ", ".join(map(str, self.tensor_parallel_sizes))
            raise ConfigError("tensor_parallel_size", f"{problem}; this model allows {allowed}")
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
        )

    def _problem_with_ranks(self, num_ranks: int) -> str | None:
        if self.num_heads % num_ranks:
            return f"{num_ranks} ranks cannot share {self.num_heads} query heads evenly"
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            return f"{num_ranks} ranks can neither share nor copy {self.num_kv_heads} KV heads evenly"
        if self.intermediate_size % num_ranks:
            return f"{num_ranks} ranks cannot share a feed-forward size of {self.intermediate_size} evenly"
        return None
