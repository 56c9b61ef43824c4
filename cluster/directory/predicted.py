"""Blocks that requests just placed are about to create. Standard library only.

They count as held, so that requests which come together with one prefix go together, until real events say so or the
guess is some seconds old. Two generations: a guess lives between one and two lifetimes, and none needs a timer.
"""

from collections.abc import Sequence

from pagoda.cluster.directory.index import slot_bit

MAX_PREDICTED = 200_000
"""Blocks of one generation; more of them end it early."""


class PredictedBlocks:
    """Hash -> mask of slots as in `PrefixIndex.match`, for a while."""

    def __init__(self, lifetime_s: float, *, now_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._turn_s = now_s + lifetime_s
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._young_retired: set[int] = set()
        self._old_retired: set[int] = set()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def generations(self, now_s: float) -> tuple[dict[bytes, int], ...]:
        """What is still believed; for `PrefixIndex.match`."""
        if now_s >= self._turn_s or len(self._young) > MAX_PREDICTED:
            is_stale = now_s >= self._turn_s + self._lifetime_s
            self._old = {} if is_stale else self._young
            self._young = {}
            self._young_retired, self._old_retired = set(), set() if is_stale else self._young_retired
            self._turn_s = now_s + self._lifetime_s
        return tuple(generation for generation in (self._young, self._old) if generation)

    def add(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The worker of `slot` is about to hold these."""
        bit = slot_bit(slot)
        for block_hash in hashes:
            self._young[block_hash] = self._young.get(block_hash, 0) | bit

    def retire(self, slot: int) -> None:
        """Its worker is gone. What was guessed of it may stay: nobody asks for the slot until it is reused."""
        self._young_retired.add(slot)

    @property
    def retired_slots(self) -> set[int]:
        """Slots that must not be given to another worker yet, since guesses of the last one may be left."""
        return self._young_retired | self._old_retired
