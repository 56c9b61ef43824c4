"""Sizes of blocks, how layers are cut into groups, and how much fits a budget."""

import pytest

from pagoda.worker.errors import ConfigError
from pagoda.worker.kv_spec import (
    SPARE_BLOCKS,
    KVCacheGroup,
    KVCacheSpec,
    blocks_in_window,
    first_block_needed,
    group_layers,
)

GROUPS = (KVCacheGroup((0, 3, 4)), KVCacheGroup((1, 2, 5, 6, 7), window=40))
SPEC = KVCacheSpec(GROUPS, 16, num_kv_heads=2, head_size=64, dtype_bytes=2)
BLOCK_BYTES = 5 * 2 * 16 * 2 * 64 * 2
STEP = 32


def test_block_is_as_large_as_the_largest_group_needs() -> None:
    """Layers x (key, value) x tokens x heads x head size x bytes."""
    assert SPEC.block_bytes == BLOCK_BYTES
    assert SPEC.token_bytes == 2 * BLOCK_BYTES // 16


@pytest.mark.parametrize(("extra", "num_blocks"), [(-1, 6), (0, 7), (1, 7)])
def test_only_whole_blocks_fit(extra: int, num_blocks: int) -> None:
    assert SPEC.num_blocks_in(7 * BLOCK_BYTES + extra) == num_blocks


def test_budget_below_one_block_of_each_group_is_an_error() -> None:
    with pytest.raises(ConfigError, match=f"memory_bytes.*each of 2 groups.*{BLOCK_BYTES}"):
        SPEC.num_blocks_in(2 * BLOCK_BYTES - 1)
    assert SPEC.num_blocks_in(2 * BLOCK_BYTES) == 2


def test_every_layer_has_its_place() -> None:
    assert SPEC.places == ((0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (1, 3), (1, 4))
    assert (SPEC.windows, SPEC.layers_per_block) == ((0, 40), 5)


def test_one_group_of_a_kind_is_announced() -> None:
    windows = (0, 0, 40, 40, 40)
    groups = tuple(KVCacheGroup((layer,), window) for layer, window in enumerate(windows))
    spec = KVCacheSpec(groups, 16, num_kv_heads=1, head_size=1, dtype_bytes=1)
    assert spec.announced_as == (0, None, 1, None, None)


@pytest.mark.parametrize("num_blocks", [2, 10, 17, 18, 40, 1000])
def test_the_longest_sequence_that_fits(num_blocks: int) -> None:
    """A block more of tokens would not."""
    longest = SPEC.num_tokens_in(num_blocks, max_step_tokens=STEP)
    assert longest % 16 == 0
    assert SPEC.num_blocks_for(longest, max_step_tokens=STEP) <= num_blocks
    assert SPEC.num_blocks_for(longest + 1, max_step_tokens=STEP) > num_blocks


def test_a_window_bounds_what_a_long_sequence_holds() -> None:
    bound = blocks_in_window(40, 16, STEP)
    assert SPEC.num_blocks_for(16_000, max_step_tokens=STEP) == 1000 + bound
    only_windows = KVCacheSpec(GROUPS[1:], 16, num_kv_heads=2, head_size=64, dtype_bytes=2)
    assert only_windows.num_tokens_in(bound, max_step_tokens=STEP) > 10**9
    assert only_windows.num_tokens_in(bound - 1, max_step_tokens=STEP) == (bound - 1) * 16


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("num_step_tokens", [1, 7, 32])
def test_the_bound_holds_at_every_step(block_size: int, window: int, num_step_tokens: int) -> None:
    """Wherever in a block a step begins: what is needed before it, and room for all that it computes."""
    bound = blocks_in_window(window, block_size, num_step_tokens)
    for num_computed in range(5 * block_size + window):
        first = first_block_needed(window, block_size, num_computed)
        assert -(-(num_computed + num_step_tokens) // block_size) - first <= bound
        assert first * block_size <= max(0, num_computed - window + 1), "the next token sees what was given up"


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_spare_blocks_serve_a_prompt_that_parts_a_block_earlier(window: int) -> None:
    """What is kept after n blocks serves a prefix of n blocks, and one of `SPARE_BLOCKS` fewer."""
    for num_blocks in range(SPARE_BLOCKS, 12):
        first = first_block_needed(window, 16, num_blocks * 16)
        shorter = num_blocks - SPARE_BLOCKS
        assert first <= max(0, shorter - -(-window // 16))


CUTS = {
    "Llama": ([0] * 32, [(0, 32)]),
    "Mistral": ([4096] * 32, [(4096, 32)]),
    "Gemma 2 2B": ([4096, 0] * 13, [(0, 13), (4096, 13)]),
    "Gemma 3 270M": (([512] * 5 + [0]) * 3, [(0, 3)] + [(512, 3)] * 5),
    "Gemma 3 1B": ((([512] * 5 + [0]) * 5)[:26], [(0, 4)] + [(512, 4)] * 5 + [(512, 2)]),
    "Gemma 3 12B": (([1024] * 5 + [0]) * 8, [(0, 8)] + [(1024, 8)] * 5),
    "one more of one kind": ([0] * 21 + [8] * 20, [(0, 21), (8, 20)]),
}


@pytest.mark.parametrize(("windows", "groups"), CUTS.values(), ids=CUTS)
def test_layers_are_cut_into_groups_of_one_size(windows: list[int], groups: list[tuple[int, int]]) -> None:
    """Full attention first; every layer is in one group, in order."""
    cut = group_layers(windows)
    assert [(group.window, len(group.layers)) for group in cut] == groups
    assert sorted(layer for group in cut for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in cut for layer in group.layers)
