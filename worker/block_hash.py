"""The one identity of a KV block, for router, directory, worker, tiers and peers.

A block's hash covers its own tokens and, through the chain, every token before it and everything else that changes
the KV values:

    chain_0 = SHA-256(domain)[:16]                                   HashDomain.root()
    chain_i = SHA-256(chain_{i-1} || tokens_i as u32 little-endian)[:16]

`domain` is each field of `HashDomain` in order, name and value, each prefixed by its length as u32 little-endian, so
that no two domains share an encoding. Nothing depends on the process: the test vectors in
`tests/unit/worker/test_block_hash.py` hold on every machine.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class HashDomain:
    """Everything besides the tokens that changes a block's KV values.

    Whoever adds an input that changes KV adds it here; a test compares the field list with the published one.
    """

    weights_digest: bytes
    """SHA-256 over the checkpoint's files."""
    weight_quantization: str
    """Load-time weight quantisation; empty if none."""
    dtype: str
    """Computation type of the KV values, such as `bfloat16`."""
    rope: str
    """Canonical text of the RoPE settings."""
    block_size: int
    """Tokens per block."""
    adapter_digest: bytes = b""
    """Content digest of the adapter in use; empty if none. Never its name: names are reused."""
    salt: bytes = b""
    """Separates tenants; empty shares with everybody."""

    def root(self) -> BlockHash:
        """The hash that precedes a sequence's first block."""
        encoded = bytearray()
        for field in fields(self):
            value = getattr(self, field.name)
            raw = value if isinstance(value, bytes) else str(value).encode()
            for part in (field.name.encode(), raw):
                encoded += struct.pack("<I", len(part)) + part
        return BlockHash(sha256(encoded).digest()[:HASH_BYTES])

    def as_text(self) -> str:
        """For others to make the same hashes; the inverse of `from_text`."""
        return json.dumps({k: v.hex() if isinstance(v, bytes) else v for k, v in asdict(self).items()}, sort_keys=True)

    @staticmethod
    def from_text(text: str) -> "HashDomain":
        """Raises `ValueError`, `TypeError` or `KeyError` if it is none."""
        values: dict[str, Any] = json.loads(text)
        of_bytes = {field.name for field in fields(HashDomain) if isinstance(field.default, bytes)} | {"weights_digest"}
        for name in of_bytes & values.keys():
            values[name] = bytes.fromhex(values[name])
        return HashDomain(**values)


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block that holds `token_ids` (each in 0..2**32-1) and follows `parent`."""
    return BlockHash(sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()[:HASH_BYTES])


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` (mutated) the hash of every full block of `token_ids` that it lacks."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(hash_block(parent, token_ids[start : start + block_size]))


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`; a last, partly filled block has none."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size)
    return hashes
