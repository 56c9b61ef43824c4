"""How the bytes of a block lie in memory: what must be equal for one worker to take another's block as it is.

A block's *key* (see `block_hash.py`) says which numbers it stands for, and is the same however many ranks share them.
The *layout* says how one rank's part of these is written down. Workers that share keys but not layouts can find each
other's prefixes in the directory, but a block of one is a miss for the other. Standard library only.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

from pagoda.worker.kv_spec import KVCacheSpec

LAYOUT_VERSION = 1
"""Of the order of dimensions: layers, key and value, tokens, heads, head size."""
FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One rank's layout. Every field is a part of the fingerprint."""

    tensor_parallel_size: int
    rank: int
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    """On this rank."""
    head_size: int
    dtype: str
    """Of the stored numbers, such as `bfloat16`."""
    layers_per_block: int
    groups: tuple[tuple[int, ...], ...]
    """The model's layers in each group."""
    version: int = LAYOUT_VERSION

    @staticmethod
    def of(spec: KVCacheSpec, *, dtype: str, tensor_parallel_size: int = 1, rank: int = 0) -> "KVLayout":
        return KVLayout(
            tensor_parallel_size=tensor_parallel_size,
            rank=rank,
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=dtype,
            layers_per_block=spec.layers_per_block,
            groups=tuple(group.layers for group in spec.groups),
        )

    def fingerprint(self) -> bytes:
        """The same in every process; SHA-256 over the fields as JSON with sorted keys, cut to 16 bytes."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return sha256(text.encode()).digest()[:FINGERPRINT_BYTES]
