"""What happens to cached KV blocks, for whoever keeps account of them elsewhere. Standard library only.

A block is announced once it can be found by others and withdrawn when it no longer can, in the order in which that
happens. Events of a step are handed on after the step, when the KV they announce is real.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.worker.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks of a group can be found from now on."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks of a group can no longer be found."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """Collects single changes into events. Not thread-safe."""

    def __init__(self, announced_as: Sequence[int | None] = (0,)) -> None:
        """`announced_as` says for each group under which number it is announced; None: another speaks for it."""
        self._announced_as = announced_as
        self._runs: list[tuple[bool, int, list[BlockHash]] | None] = []
        """(is it stored, group, hashes); None where all was cleared."""

    def stored(self, group: int, block_hash: BlockHash) -> None:
        self._note(True, group, block_hash)

    def removed(self, group: int, block_hash: BlockHash) -> None:
        self._note(False, group, block_hash)

    def cleared(self) -> None:
        """What was noted before is void."""
        self._runs = [None]

    def take(self) -> Sequence[KVEvent]:
        """What has happened since the last call, in order."""
        runs, self._runs = self._runs, []
        events: list[KVEvent] = []
        for run in runs:
            if run is None:
                events.append(AllBlocksCleared())
            else:
                is_stored, group, hashes = run
                events.append((BlockStored if is_stored else BlockRemoved)(group, tuple(hashes)))
        return events

    def _note(self, is_stored: bool, own_group: int, block_hash: BlockHash) -> None:
        group = self._announced_as[own_group]
        if group is None:
            return
        last = self._runs[-1] if self._runs else None
        if last is not None and last[0] is is_stored and last[1] == group:
            last[2].append(block_hash)
        else:
            self._runs.append((is_stored, group, [block_hash]))
