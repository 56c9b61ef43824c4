"""Which worker holds which KV block, in which tier. Standard library only; no clock, no network.

Workers are numbered by *slots*. An entry is a key and one integer, in which each slot has a bit for each tier, so that
a prompt is matched against all workers in one walk:

    bit NUM_TIERS * slot + tier        device bits are those of `1 << NUM_TIERS * slot`

A slot is never emptied: when its worker goes or starts anew the slot is retired, which takes effect at once since its
bits are ignored from then on, and is swept out of the entries in small pieces until it can be given away again.

Two things keep the directory from ever standing still for long. Entries lie in many small dictionaries: a large one
that grows is copied in one go. And they hold nothing but bytes and integers: those the garbage collector passes by.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pagoda.worker.block_hash import HASH_BYTES

_NUM_SHARDS = 256
_MAX_INTERNED = 65_536


class Tier(IntEnum):
    """Where a worker keeps a block. Lower is nearer."""

    DEVICE = 0
    HOST = 1
    DISK = 2


NUM_TIERS = len(Tier)


def slot_bit(slot: int, tier: Tier = Tier.DEVICE) -> int:
    """Its bit in an entry; that of the device also stands for the slot itself in masks of slots."""
    return 1 << (NUM_TIERS * slot + tier)


@dataclass(slots=True)
class PrefixMatch:
    """How much of a prompt each slot holds, in blocks from its beginning that every group can serve."""

    num_blocks: dict[int, int] = field(default_factory=dict)
    """By slot; those that hold nothing are left out."""
    num_lower: dict[int, dict[Tier, int]] = field(default_factory=dict)
    """Of these, blocks of which at least one group has to come from a lower tier than the device; by slot."""


class PrefixIndex:
    """Key -> holders, for all workers of one model."""

    def __init__(self, windows: Sequence[int] = (0,)) -> None:
        """`windows` says for each group of layers how many blocks before a boundary it needs; 0 is all of them."""
        self.windows = tuple(windows)
        self._shards: list[list[dict[bytes, int]]] = [[{} for _ in range(_NUM_SHARDS)] for _ in self.windows]
        self._interned: dict[int, int] = {}
        """So that equal entries are mostly one object."""
        self._num_held: dict[int, list[int]] = {}
        """Slot in use -> blocks per tier."""
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._device_bits = 0
        """Of all slots that were ever in use."""
        self._retired = 0
        """All bits of retired slots."""
        self._sweep: Iterator[None] | None = None

    # -- slots -----------------------------------------------------------------------------------

    @property
    def num_entries(self) -> int:
        """Keys, those of retired slots among them until they are swept."""
        return sum(len(shard) for group in self._shards for shard in group)

    @property
    def is_swept(self) -> bool:
        """Whether nothing of a retired slot is left."""
        return not self._retired

    def add_slot(self, avoid: Container[int] = ()) -> int:
        """A slot for a worker that holds nothing; none of those to `avoid`."""
        slot = next((slot for slot in self._free_slots if slot not in avoid), self._num_slots)
        if slot in self._free_slots:
            self._free_slots.remove(slot)
        self._num_slots = max(self._num_slots, slot + 1)
        self._device_bits |= slot_bit(slot)
        self._num_held[slot] = [0] * NUM_TIERS
        return slot

    def retire_slot(self, slot: int) -> None:
        """Its worker is gone, or has lost what it held. Call `sweep` until it is done."""
        del self._num_held[slot]
        self._retired |= _all_tiers(slot_bit(slot))

    def sweep(self) -> bool:
        """Do a small piece of what is left of retired slots. False if nothing is."""
        if self._sweep is None:
            if not self._retired:
                return False
            self._sweep = self._sweep_out(self._retired)
        try:
            next(self._sweep)
        except StopIteration:
            self._sweep = None
        return True

    def _sweep_out(self, retired: int) -> Iterator[None]:
        for group in self._shards:
            for shard in group:
                for key, entry in [(key, entry) for key, entry in shard.items() if entry & retired]:
                    if rest := entry & ~retired:
                        shard[key] = self._intern(rest)
                    else:
                        del shard[key]
                yield
        self._retired &= ~retired
        self._free_slots += _slots(retired & self._device_bits)

    # -- entries ---------------------------------------------------------------------------------

    def num_held(self, slot: int) -> tuple[int, ...]:
        """Blocks that a slot holds, per tier, over all groups."""
        return tuple(self._num_held[slot])

    def store(self, slot: int, tier: Tier, group: int, packed: bytes) -> None:
        """`packed` are block hashes of `HASH_BYTES` each, one behind the other. What is stored twice counts once."""
        bit, shards, num_new = slot_bit(slot, tier), self._shards[group], 0
        for start in range(0, len(packed), HASH_BYTES):
            key = packed[start : start + HASH_BYTES]
            shard = shards[key[0]]
            entry = shard.get(key, 0)
            if not entry & bit:
                shard[key] = self._intern(entry | bit)
                num_new += 1
        self._num_held[slot][tier] += num_new

    def remove(self, slot: int, tier: Tier, group: int, packed: bytes) -> None:
        """The inverse. What is not there is ignored."""
        bit, shards, num_gone = slot_bit(slot, tier), self._shards[group], 0
        for start in range(0, len(packed), HASH_BYTES):
            key = packed[start : start + HASH_BYTES]
            shard = shards[key[0]]
            entry = shard.get(key, 0)
            if entry & bit:
                if rest := entry & ~bit:
                    shard[key] = self._intern(rest)
                else:
                    del shard[key]
                num_gone += 1
        self._num_held[slot][tier] -= num_gone

    def keys_of(self, slot: int, tier: Tier) -> Iterator[tuple[int, bytes]]:
        """(group, hash) of all that a slot holds: a walk over every entry, for tests and people."""
        bit = slot_bit(slot, tier)
        for group, shards in enumerate(self._shards):
            for shard in shards:
                yield from ((group, key) for key, entry in shard.items() if entry & bit)

    def _intern(self, entry: int) -> int:
        same = self._interned.get(entry)
        if same is None:
            if len(self._interned) >= _MAX_INTERNED:
                self._interned.clear()
            same = self._interned[entry] = entry
        return same

    # -- matching --------------------------------------------------------------------------------

    def match(
        self, hashes: Sequence[bytes], candidates: int, predicted: Sequence[dict[bytes, int]] = ()
    ) -> PrefixMatch:
        """How many of a prompt's first blocks each of the `candidates` holds.

        `predicted` says of blocks who is about to hold them on its device, in all groups. Both are masks of slots.
        """
        if len(self.windows) == 1 and not self.windows[0]:
            return self._match_full(hashes, candidates, predicted)
        return self._match_groups(hashes, candidates, predicted)

    def _match_full(
        self, hashes: Sequence[bytes], candidates: int, predicted: Sequence[dict[bytes, int]]
    ) -> PrefixMatch:
        match = PrefixMatch()
        shards = self._shards[0]
        alive = candidates
        depth = 0
        for key in hashes:
            entry = shards[key[0]].get(key, 0)
            missing = alive & ~entry  # on the device
            if missing:
                for guesses in predicted:
                    entry |= guesses.get(key, 0)
                missing = alive & ~entry
            if missing:
                lower = missing & (entry >> 1 | entry >> 2)
                if gone := missing ^ lower:
                    if depth:
                        for slot in _slots(gone):
                            match.num_blocks[slot] = depth
                    alive ^= gone
                    if not alive:
                        return match
                if lower:
                    self._count_lower(match, entry, lower)
            depth += 1
        if depth:
            for slot in _slots(alive):
                match.num_blocks[slot] = depth
        return match

    def _count_lower(self, match: PrefixMatch, entry: int, lower: int) -> None:
        for slot in _slots(lower):
            counts = match.num_lower.setdefault(slot, {})
            tier = _nearest(entry, slot)
            counts[tier] = counts.get(tier, 0) + 1

    def _match_groups(
        self, hashes: Sequence[bytes], candidates: int, predicted: Sequence[dict[bytes, int]]
    ) -> PrefixMatch:
        """A boundary counts for a slot if each group holds all that it needs before it."""
        rows: list[list[int]] = []
        served: list[int] = []
        run_begin: list[dict[int, int]] = [{} for _ in self.windows]
        full = candidates
        for index, key in enumerate(hashes):
            guessed = 0
            for guesses in predicted:
                guessed |= guesses.get(key, 0)
            row = [shards[key[0]].get(key, 0) | guessed for shards in self._shards]
            rows.append(row)
            mask = candidates
            for group, (window, entry) in enumerate(zip(self.windows, row, strict=True)):
                missing = candidates & ~(entry | entry >> 1 | entry >> 2)
                if not window:
                    full &= ~missing
                    continue
                begins = run_begin[group]
                for slot in _slots(missing):
                    begins[slot] = index + 1
                for slot, begin in begins.items():
                    if index + 1 - begin < min(window, index + 1):
                        mask &= ~slot_bit(slot)
            served.append(mask & full)
            if not full:
                break
        match = PrefixMatch()
        for index in reversed(range(len(served))):
            for slot in _slots(served[index]):
                if slot not in match.num_blocks:
                    match.num_blocks[slot] = index + 1
                    self._count_lower_of(match, rows, slot, index + 1)
        return match

    def _count_lower_of(self, match: PrefixMatch, rows: list[list[int]], slot: int, depth: int) -> None:
        counts: dict[Tier, int] = {}
        for index in range(depth):
            tiers = [
                _nearest(entry, slot)
                for window, entry in zip(self.windows, rows[index], strict=True)
                if not window or index >= depth - window
            ]
            worst = max(tiers, default=Tier.DEVICE)
            if worst:
                counts[worst] = counts.get(worst, 0) + 1
        if counts:
            match.num_lower[slot] = counts


def _nearest(entry: int, slot: int) -> Tier:
    """The nearest tier in which a slot holds a block that it holds."""
    return next(tier for tier in Tier if entry & slot_bit(slot, tier))


def _all_tiers(slots: int) -> int:
    return slots | slots << 1 | slots << 2


def _slots(mask: int) -> Iterator[int]:
    """The slots of a mask."""
    while mask:
        lowest = mask & -mask
        yield (lowest.bit_length() - 1) // NUM_TIERS
        mask ^= lowest
