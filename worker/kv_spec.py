"""What a KV block is: which layers it holds, how many bytes, how many blocks fit a budget."""

from dataclasses import dataclass
from typing import Literal

from pagoda.worker.errors import ConfigError

AttentionKind = Literal["full"]


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one attention kind. They share a block table; one block holds all of them."""

    kind: AttentionKind
    num_layers: int


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of the cache on one rank.

    The cache of a group is one block-first tensor, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`
    (2 = key, value), so that a block of all layers is one run of bytes.
    """

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    head_size: int
    dtype_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block. Groups share a pool, so the largest group sets the size."""
        layers = max(group.num_layers for group in self.groups)
        return layers * 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    def num_blocks_in(self, memory_bytes: int) -> int:
        """Blocks that fit into `memory_bytes`. Raises `ConfigError` if not even one does."""
        num_blocks = memory_bytes // self.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                "memory_bytes", f"{memory_bytes} bytes of KV cache hold no block; one block takes {self.block_bytes}"
            )
        return num_blocks
