"""Which faults come when, drawn from a seed and known before the first one. Pure.

A plan says at what second something breaks and how. Which of the workers it hits is a number in [0, 1), as nobody knows
beforehand which will live then: of those that do, in the order of their age, it is the one at this place.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class FaultKind(StrEnum):
    """What may break."""

    KILL_WORKER = "kill-worker"
    PAUSE_WORKER = "pause-worker"
    KILL_DIRECTORY = "kill-directory"
    CUT_DIRECTORY = "cut-directory"
    SLOW_DIRECTORY = "slow-directory"
    MUTE_DIRECTORY = "mute-directory"
    KILL_INGRESS = "kill-ingress"
    KILL_PROXY = "kill-proxy"
    FILL_DISK = "fill-disk"
    JUMP_CLOCK = "jump-clock"


@dataclass(frozen=True, slots=True)
class Fault:
    """One of a plan."""

    at_s: float
    """Seconds since the plan began."""
    kind: FaultKind
    place: float
    """Which one it hits: `victim` takes it."""
    amount: float
    """In [0, 1): how bad it is, where that can be chosen."""

    def victim(self, candidates: Sequence[T]) -> T:
        """Of at least one candidate."""
        return candidates[int(self.place * len(candidates))]

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind:15} place {self.place:.2f}, amount {self.amount:.2f}"


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """Faults of a mix: of each kind one in each of its periods, at a random time within it."""

    seed: int
    duration_s: float
    period_s: Mapping[FaultKind, float]

    @property
    def faults(self) -> list[Fault]:
        """In the order of their times."""
        drawn = [fault for kind, period_s in self.period_s.items() for fault in self._faults_of(kind, period_s)]
        return sorted(drawn, key=lambda fault: fault.at_s)

    def _faults_of(self, kind: FaultKind, period_s: float) -> Iterator[Fault]:
        draw = random.Random(f"{self.seed} {kind}")  # each of its own, so that one more kind leaves the others alone
        for number in range(int(self.duration_s / period_s)):
            yield Fault((number + draw.random()) * period_s, kind, draw.random(), draw.random())

    def lines(self) -> Iterator[str]:
        """What is going to happen, for people."""
        counts = ", ".join(f"{int(self.duration_s / period)} {kind}" for kind, period in self.period_s.items())
        yield f"plan of seed {self.seed}, {self.duration_s:g} s: {counts}"
        yield from map(str, self.faults)
