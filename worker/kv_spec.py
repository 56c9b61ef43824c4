"""What a KV block is: which layers it holds, how many bytes, how many blocks fit a budget. Standard library only.

Layers whose attention sees the same form a kind. A kind with many layers is cut into *groups* of equally many, so that
the blocks of all groups have one size and come from one pool: memory goes where the mix of long and short requests
needs it. Each group has its own block table.

    layers   w w w w w f w w w w w f        w: sees a window, f: sees everything before it
    groups   0 0 1 1 2 3 2 3 4 ...          2 layers each here; a block holds a group's layers of 16 tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one attention kind. They share a block table; one block holds all of them."""

    layers: tuple[int, ...]
    """Indices of the model's layers, in order; at most `KVCacheSpec.layers_per_block`."""
    window: int = 0
    """Positions that a query sees, its own included; 0: all before it."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of the cache on one rank.

    The cache is one block-first tensor, `[num_blocks, layers_per_block, 2, block_size, num_kv_heads, head_size]`
    (2 = key, value), so that a block of all layers of a group is one run of bytes.
    """

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    """On this rank."""
    head_size: int
    dtype_bytes: int

    @property
    def layers_per_block(self) -> int:
        """Layers that a block has room for: those of the largest group."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, the same in all groups."""
        return self.layers_per_block * 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each group, in tokens; 0: it sees everything."""
        return tuple(group.window for group in self.groups)

    @property
    def announced_as(self) -> tuple[int | None, ...]:
        """Under which number each group's blocks are announced to others.

        One group of a kind speaks for all of it: their blocks are stored together, and the first group's go first.
        """
        kinds = list(dict.fromkeys(self.windows))
        return tuple(
            kinds.index(window) if window not in self.windows[:number] else None
            for number, window in enumerate(self.windows)
        )

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model: its group, and which of a block's layers it is."""
        found = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in sorted(found))

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes as long as every layer holds it, room that is left over in blocks included."""
        return len(self.groups) * self.block_bytes // self.block_size

    def num_blocks_in(self, memory_bytes: int) -> int:
        """Blocks that fit into `memory_bytes`. Raises `ConfigError` if not even one of each group does."""
        num_blocks = memory_bytes // self.block_bytes
        if num_blocks < len(self.groups):
            raise ConfigError(
                "memory_bytes",
                f"{memory_bytes} bytes of KV cache hold no block of each of {len(self.groups)} groups of layers; "
                f"one block takes {self.block_bytes}",
            )
        return num_blocks

    def num_blocks_for(self, num_tokens: int, *, max_step_tokens: int) -> int:
        """Blocks that one sequence of `num_tokens` holds at most, computed in steps of up to `max_step_tokens`."""
        num_columns = -(-num_tokens // self.block_size)
        return sum(
            min(num_columns, blocks_in_window(window, self.block_size, max_step_tokens)) if window else num_columns
            for window in self.windows
        )

    def num_tokens_in(self, num_blocks: int, *, max_step_tokens: int) -> int:
        """The longest sequence that `num_blocks` hold, in whole blocks; without end if all layers have windows."""
        fewest, most = 0, num_blocks + 1 if 0 in self.windows else 2**40
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fits = self.num_blocks_for(middle * self.block_size, max_step_tokens=max_step_tokens) <= num_blocks
            fewest, most = (middle, most) if fits else (fewest, middle)
        return fewest * self.block_size


_FULL_WEIGHT = 4
SPARE_BLOCKS = 1
"""Blocks that are kept before a window, so that a prompt that differs from the cached one in its last block still finds
what the block before that one needs."""


def blocks_in_window(window: int, block_size: int, max_step_tokens: int) -> int:
    """Blocks of a window group that a sequence holds at most during a step."""
    # The window before the step and the step's own tokens, which may begin and end within a block.
    return -(-(window + max_step_tokens) // block_size) + 2 + SPARE_BLOCKS


def first_block_needed(window: int, block_size: int, num_computed_tokens: int) -> int:
    """The first block that a window group must keep for what comes after `num_computed_tokens` tokens.

    Not only for the next token, but for whoever finds the blocks before it in the cache; see `SPARE_BLOCKS`.
    """
    boundary = num_computed_tokens // block_size * block_size
    return max(0, (boundary - window) // block_size - SPARE_BLOCKS)


def blocks_before(window: int, block_size: int) -> int:
    """Blocks before a boundary that a window group needs for it to be found in the cache; 0 for all."""
    return -(-window // block_size)


def group_layers(windows: Sequence[int]) -> tuple[KVCacheGroup, ...]:
    """Cut a model's layers into groups. `windows` are those of its layers, in tokens; 0 for full attention.

    Groups are as large as makes the sum of unused room (in layers) and groups smallest: each group costs a table in
    every step, and unused room costs memory; in groups with full attention several times as much, as these hold
    every token.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)

    def cost(size: int) -> tuple[int, int]:
        num_groups = num_unused = 0
        for window, layers in kinds.items():
            num_groups += -(-len(layers) // size)
            num_unused += -len(layers) % size * (1 if window else _FULL_WEIGHT)
        return num_unused + num_groups, num_unused

    size = min(range(1, len(windows) + 1), key=cost)
    return tuple(
        KVCacheGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items())  # full attention first
        for start in range(0, len(layers), size)
    )
