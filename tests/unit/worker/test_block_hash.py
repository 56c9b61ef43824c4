"""The published vectors and properties of the block hash."""

import os
import struct
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from pagoda.worker.block_hash import HashChain, HashDomain, extend_hashes, hash_block, hash_blocks, hash_of_parts

PLAIN = HashDomain(
    weights_digest=bytes(range(32)),
    weight_quantization="",
    dtype="bfloat16",
    rope="theta=10000",
    block_size=4,
)
FULL = HashDomain(
    weights_digest=bytes(range(32)),
    weight_quantization="int8",
    dtype="float32",
    rope="theta=500000,factor=8",
    block_size=16,
    adapter_digest=b"\xaa" * 32,
    salt="zażółć".encode(),
)
PLAIN_ROOT = "ad1691804e0343602275aeec84776e26"
FULL_ROOT = "e79c2d3eb8689e62a16f27ec884ca2ef"
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 0, 255, 65536, 4294967295)
CHAIN = ["f0b4da3adad0287a50417dbeaf33f563", "8a7810e11eccdba647137bd92ab85ed0", "c57dc18d1533dbfc43074b51aaf99edf"]

HASH_IN_A_NEW_PROCESS = f"""
from pagoda.worker.block_hash import HashDomain, hash_blocks
domain = HashDomain(bytes(range(32)), "", "bfloat16", "theta=10000", 4)
print(*(block_hash.hex() for block_hash in hash_blocks(domain.root(), {TOKENS}, 4)))
"""


@pytest.mark.parametrize(("domain", "root"), [(PLAIN, PLAIN_ROOT), (FULL, FULL_ROOT)])
def test_root_is_the_published_vector(domain: HashDomain, root: str) -> None:
    """The first 16 bytes of SHA-256 over, for each field in order, <u32 length><name><u32 length><value>."""
    assert domain.root().hex() == root


def test_chain_is_the_published_vector() -> None:
    """Each hash is the first 16 bytes of SHA-256 over <hash before><token as u32 little-endian>..."""
    assert [block_hash.hex() for block_hash in hash_blocks(PLAIN.root(), TOKENS, 4)] == CHAIN


def test_published_fields() -> None:
    """A new input changes every hash in every cluster: whoever adds one comes by here and publishes new vectors."""
    assert [field.name for field in fields(HashDomain)] == [
        "weights_digest",
        "weight_quantization",
        "dtype",
        "rope",
        "block_size",
        "adapter_digest",
        "salt",
    ]


@pytest.mark.parametrize("name", [field.name for field in fields(HashDomain)])
def test_every_field_changes_the_root(name: str) -> None:
    value = getattr(FULL, name)
    other = value + 1 if isinstance(value, int) else value + value[:1]
    assert replace(FULL, **{name: other}).root() != FULL.root()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"weight_quantization": "ab", "dtype": "c"}, {"weight_quantization": "a", "dtype": "bc"}),
        ({"adapter_digest": b"ab", "salt": b""}, {"adapter_digest": b"a", "salt": b"b"}),
        ({"adapter_digest": b"", "salt": b"x"}, {"adapter_digest": b"x", "salt": b""}),
        ({"adapter_digest": b"\4\0\0\0salt\1\0\0\0x"}, {"salt": b"x"}),
    ],
)
def test_bytes_do_not_move_between_fields(one: dict[str, object], other: dict[str, object]) -> None:
    """Two domains whose values are equal when written one after the other still differ."""
    assert replace(PLAIN, **one).root() != replace(PLAIN, **other).root()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_same_in_every_process(seed: str) -> None:
    """Python's own hash seed, which differs between processes, has no part in it."""
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", HASH_IN_A_NEW_PROCESS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == CHAIN


@pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
def test_extending_gives_what_hashing_the_whole_gives(cut: int) -> None:
    root = PLAIN.root()
    hashes = hash_blocks(root, TOKENS[:cut], 4)
    extend_hashes(hashes, root, TOKENS, 4)
    assert hashes == hash_blocks(root, TOKENS, 4)


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_partly_filled_block_has_no_hash(num_tokens: int, num_hashes: int) -> None:
    assert len(hash_blocks(PLAIN.root(), TOKENS[:num_tokens], 4)) == num_hashes


def test_block_depends_on_everything_before_it() -> None:
    """Equal tokens after different tokens, or in a different domain, are different blocks."""
    root = PLAIN.root()
    after_ones = hash_blocks(root, [1, 1, 7, 7], 2)[1]
    after_twos = hash_blocks(root, [2, 2, 7, 7], 2)[1]
    for_tenant = hash_blocks(replace(PLAIN, salt=b"tenant").root(), [1, 1, 7, 7], 2)[1]
    assert len({after_ones, after_twos, for_tenant, hash_block(root, [7, 7])}) == 4


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_token_beyond_32_bits_is_an_error(token_id: int) -> None:
    """It must not be cut to 32 bits and hash like another token."""
    with pytest.raises(struct.error):
        hash_block(PLAIN.root(), [token_id])


# -- salts and public prefixes -------------------------------------------------------------------

SALT = bytes(range(100, 132))
FORKED = ["f0b4da3adad0287a50417dbeaf33f563", "b6d3103971cfd6a9c41000519a4a5023", "54dbc35ee085e3b18f76cb9181dcf46d"]


def test_chain_behind_a_public_prefix_is_the_published_vector() -> None:
    """The first block is public; the parent of the second is SHA-256 over <u32 length><part> of "fork", hash, salt."""
    chain = PLAIN.chain(SALT, num_public_tokens=4)
    assert [block_hash.hex() for block_hash in chain.blocks(TOKENS, 4)] == FORKED
    assert FORKED[0] == CHAIN[0]
    fork = hash_of_parts(b"fork", bytes.fromhex(CHAIN[0]), SALT)[:16]
    assert hash_block(fork, TOKENS[4:8]).hex() == FORKED[1]


@pytest.mark.parametrize(
    ("num_public_tokens", "num_shared"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)]
)
def test_only_blocks_wholly_inside_the_public_prefix_are_shared(num_public_tokens: int, num_shared: int) -> None:
    """With everybody who begins so: those of other salts, and those without one."""
    one, other, unsalted = (
        PLAIN.chain(salt, num_public_tokens=num_public_tokens).blocks(TOKENS, 4) for salt in (b"one", b"two", b"")
    )
    assert one[:num_shared] == other[:num_shared] == unsalted[:num_shared]
    assert not {*one[num_shared:]} & {*other[num_shared:]}
    assert not {*one[num_shared:], *other[num_shared:]} & {*unsalted}


def test_without_a_public_prefix_a_salt_is_a_field_of_the_domain() -> None:
    """Hashes that were made before there were public prefixes stay what they were."""
    assert PLAIN.chain(b"") == HashChain(PLAIN.root())
    assert PLAIN.chain(SALT) == HashChain(replace(PLAIN, salt=SALT).root())


@pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
def test_a_forked_chain_may_be_extended_anywhere(cut: int) -> None:
    """A sequence grows token by token, a directory hashes a prompt whole."""
    chain = PLAIN.chain(SALT, num_public_tokens=6)
    hashes = chain.blocks(TOKENS[:cut], 4)
    chain.extend(hashes, TOKENS, 4)
    assert hashes == chain.blocks(TOKENS, 4)


def test_a_salt_cannot_be_forged_by_tokens() -> None:
    """Tokens whose bytes are another's salt, or the encoding of a fork, name no block of that other."""
    salt = struct.pack("<4I", 9, 9, 9, 9)
    theirs = PLAIN.chain(salt, num_public_tokens=4).blocks(TOKENS, 4)
    as_tokens = hash_blocks(PLAIN.root(), [*TOKENS[:4], 9, 9, 9, 9, *TOKENS[4:]], 4)
    assert not {*theirs[1:]} & {*as_tokens}


@pytest.mark.parametrize(
    ("one", "other"), [((b"ab", b"c"), (b"a", b"bc")), ((b"", b"x"), (b"x", b"")), ((b"x",), (b"x", b""))]
)
def test_bytes_do_not_move_between_parts(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    assert hash_of_parts(*one) != hash_of_parts(*other)
