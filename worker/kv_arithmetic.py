"""How much KV memory a model needs, reckoned from the shape of its attention alone. Standard library only.

    numbers a token and layer     MHA, GQA, MQA: 2 x KV heads x head size     MLA: latent + RoPE part, for all heads

What an engine would hold is a `KVCacheSpec`'s to say, the same that the engine makes its cache by.
"""

from dataclasses import dataclass, replace

from pagoda.worker.errors import ConfigError
from pagoda.worker.kv_spec import KVCacheSpec, group_layers

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a model decides how much KV memory it needs."""

    windows: tuple[int, ...]
    """Of each layer: positions that a query sees, its own included; 0: all before it."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    latent_size: int = 0
    """With MLA, the numbers of a token and layer: of the latent, and of the part of keys that RoPE turns; else 0.

    Source: DeepSeek-V2 (arXiv:2405.04434), sec. 2.1.
    """
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """How many ranks can share the model."""

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent_size:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    def on_one_of(self, num_ranks: int) -> "AttentionShape":
        """What one of so many ranks holds: KV heads are split, or copied where ranks are more. Raises `ConfigError`."""
        if num_ranks not in self.tensor_parallel_sizes:
            allowed = ", ".join(map(str, self.tensor_parallel_sizes))
            raise ConfigError(
                "tensor_parallel_size", f"{num_ranks} ranks cannot share this model evenly; it allows {allowed}"
            )
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=max(1, self.num_kv_heads // num_ranks))

    def cache_spec(self, *, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """The cache of a rank that holds all of this shape. A latent is the same on every rank."""
        return KVCacheSpec(
            groups=group_layers(self.windows),
            block_size=block_size,
            num_kv_heads=1 if self.latent_size else self.num_kv_heads,
            head_size=self.latent_size or self.head_size,
            dtype_bytes=dtype_bytes,
            vectors_per_head=1 if self.latent_size else 2,
        )


@dataclass(frozen=True, slots=True)
class KVFigures:
    """What fits into one rank's memory for KV blocks, and what requests take of it."""

    spec: KVCacheSpec
    memory_bytes: int
    context_len: int
    """Tokens of the requests that are counted."""
    max_step_tokens: int
    """Tokens computed in one step: what a window's layers hold besides the window."""

    @property
    def num_blocks(self) -> int:
        """That fit into the memory. Raises `ConfigError` if not even one of each group does."""
        return self.spec.num_blocks_in(self.memory_bytes)

    @property
    def num_tokens(self) -> int:
        """That fit with every layer holding them, as it is with requests that are shorter than the windows."""
        return self.num_blocks // len(self.spec.groups) * self.spec.block_size

    @property
    def max_request_tokens(self) -> int | None:
        """The longest single request that fits; None: none is too long, since every layer has a window."""
        if self._blocks_for(_ENDLESS_TOKENS) <= self.num_blocks:
            return None
        return self.spec.num_tokens_in(self.num_blocks, max_step_tokens=self.max_step_tokens)

    @property
    def request_bytes(self) -> int:
        """That a request of `context_len` tokens takes at most, in whole blocks."""
        return self._blocks_for(self.context_len) * self.spec.block_bytes

    @property
    def num_requests(self) -> int:
        """Requests of `context_len` tokens that fit at once and have nothing in common."""
        return self.num_blocks // self._blocks_for(self.context_len)

    @property
    def lasting_token_bytes(self) -> int:
        """Bytes of a token in the layers without a window, which hold it to the end of its request."""
        return self.spec.windows.count(0) * self.spec.block_bytes // self.spec.block_size

    @property
    def window_bytes(self) -> int:
        """Bytes that a request, however long, takes at most in the layers with windows."""
        groups = tuple(group for group in self.spec.groups if group.window)
        windowed = replace(self.spec, groups=groups)
        return windowed.num_blocks_for(_ENDLESS_TOKENS, max_step_tokens=self.max_step_tokens) * self.spec.block_bytes

    def _blocks_for(self, num_tokens: int) -> int:
        return self.spec.num_blocks_for(num_tokens, max_step_tokens=self.max_step_tokens)


_ENDLESS_TOKENS = 2**62
"""More than any window or memory."""
