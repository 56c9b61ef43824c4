"""The one identity of a KV block, for router, directory, worker, tiers and peers.

A block's hash covers its own tokens and, through the chain, every token before it and everything else that changes
the KV values:

    chain_0 = SHA-256(domain)[:16]                                   HashDomain.root()
    chain_i = SHA-256(chain_{i-1} || tokens_i as u32 little-endian)[:16]

A request may begin with tokens that the operator has declared public. The blocks that lie wholly inside these are
named without salt, and the salt takes effect behind them:

    chain_i = SHA-256(fork(chain_{i-1}, salt) || tokens_i)[:16]      for the first block that is not public
    fork(parent, salt) = SHA-256("fork", parent, salt)[:16], each part prefixed by its length as above

`domain` is each field of `HashDomain` in order, name and value, each prefixed by its length as u32 little-endian, so
that no two domains share an encoding. Nothing depends on the process: the test vectors in
`tests/unit/worker/test_block_hash.py` hold on every machine.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
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
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            parts += [field.name.encode(), value if isinstance(value, bytes) else str(value).encode()]
        return BlockHash(hash_of_parts(*parts)[:HASH_BYTES])

    def chain(self, salt: bytes, *, num_public_tokens: int = 0) -> "HashChain":
        """How a request's blocks are named; its first `num_public_tokens` tokens are public."""
        num_public_blocks = num_public_tokens // self.block_size if salt else 0
        root = replace(self, salt=b"" if num_public_blocks else salt).root()
        return HashChain(root, num_public_blocks, salt if num_public_blocks else b"")

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


@dataclass(frozen=True, slots=True)
class HashChain:
    """How the blocks of one request are named. Whoever hashes a request's blocks does it by this."""

    root: BlockHash
    """The hash that precedes the first block."""
    num_public_blocks: int = 0
    """Blocks at the start that are named without salt."""
    salt: bytes = b""
    """What is hashed in behind them; of no effect where there are none."""

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int], block_size: int) -> None:
        """Append to `hashes` (mutated) the hash of every full block of `token_ids` that it lacks."""
        for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
            parent = hashes[-1] if hashes else self.root
            if hashes and len(hashes) == self.num_public_blocks:
                parent = BlockHash(hash_of_parts(b"fork", parent, self.salt)[:HASH_BYTES])
            hashes.append(hash_block(parent, token_ids[start : start + block_size]))

    def blocks(self, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
        """The hashes of all full blocks of `token_ids`; a last, partly filled block has none."""
        hashes: list[BlockHash] = []
        self.extend(hashes, token_ids, block_size)
        return hashes


def hash_of_parts(*parts: bytes) -> bytes:
    """SHA-256 over each part prefixed by its length as u32 little-endian: no byte can move from one to the next."""
    return sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block that holds `token_ids` (each in 0..2**32-1) and follows `parent`."""
    return BlockHash(sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()[:HASH_BYTES])


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `hashes` (mutated) the hash of every full block of `token_ids` that it lacks."""
    HashChain(root).extend(hashes, token_ids, block_size)


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`; a last, partly filled block has none."""
    return HashChain(root).blocks(token_ids, block_size)
