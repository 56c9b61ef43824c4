"""Sizes of blocks, and how many fit a budget."""

import pytest

from pagoda.worker.errors import ConfigError
from pagoda.worker.kv_spec import KVCacheGroup, KVCacheSpec

SPEC = KVCacheSpec((KVCacheGroup("full", 3), KVCacheGroup("full", 5)), 16, num_kv_heads=2, head_size=64, dtype_bytes=2)
BLOCK_BYTES = 5 * 2 * 16 * 2 * 64 * 2


def test_block_is_as_large_as_the_largest_group_needs() -> None:
    """Layers x (key, value) x tokens x heads x head size x bytes."""
    assert SPEC.block_bytes == BLOCK_BYTES


@pytest.mark.parametrize(("extra", "num_blocks"), [(-1, 6), (0, 7), (1, 7)])
def test_only_whole_blocks_fit(extra: int, num_blocks: int) -> None:
    assert SPEC.num_blocks_in(7 * BLOCK_BYTES + extra) == num_blocks


def test_budget_below_one_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match=f"memory_bytes.*{BLOCK_BYTES}"):
        SPEC.num_blocks_in(BLOCK_BYTES - 1)
