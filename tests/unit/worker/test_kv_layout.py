"""Fingerprints of block layouts: the same everywhere, and different wherever bytes would be."""

from dataclasses import fields, replace

import pytest

from pagoda.worker.kv_layout import KVLayout
from pagoda.worker.kv_spec import KVCacheGroup, KVCacheSpec

SPEC = KVCacheSpec((KVCacheGroup((0, 1, 2)),), 16, num_kv_heads=2, head_size=64, dtype_bytes=2)
LAYOUT = KVLayout.of(SPEC, dtype="bfloat16")
CHANGES = {
    "tensor_parallel_size": 2,
    "rank": 1,
    "block_size": 8,
    "num_kv_heads": 1,
    "head_size": 128,
    "dtype": "float16",
    "layers_per_block": 4,
    "groups": ((0, 2, 1),),
    "version": 2,
}


def test_vector() -> None:
    """Made here once; whoever changes it makes every block on a disk a miss."""
    assert LAYOUT.fingerprint().hex() == "5ea3f8cc3a000fd8d6ff7024f17066c6"


def test_every_field_counts() -> None:
    assert CHANGES.keys() == {field.name for field in fields(KVLayout)}
    made = {LAYOUT.fingerprint()} | {replace(LAYOUT, **{name: value}).fingerprint() for name, value in CHANGES.items()}
    assert len(made) == 1 + len(CHANGES)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_layouts_of_their_own(size: int) -> None:
    """Also where each holds a copy of the one KV head, and its bytes would be the same."""
    made = {KVLayout.of(SPEC, dtype="bfloat16", tensor_parallel_size=size, rank=r).fingerprint() for r in range(size)}
    assert len(made | {LAYOUT.fingerprint()}) == size + 1
