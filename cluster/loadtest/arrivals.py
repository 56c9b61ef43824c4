"""When things begin, as seconds from the start. Pure: the random source is an argument."""

import random
from collections.abc import Iterator
from typing import Literal

ArrivalKind = Literal["poisson", "constant", "bursts"]
ARRIVAL_KINDS: tuple[ArrivalKind, ...] = ("poisson", "constant", "bursts")


def arrivals(kind: ArrivalKind, rate: float, draw: random.Random, *, burst_size: int = 8) -> Iterator[float]:
    """Endless arrival times at `rate` per second on average, the first of them at 0 for `constant` and `bursts`.

    poisson   independent of each other: exponential gaps
    constant  equal gaps
    bursts    `burst_size` at once; bursts are independent of each other
    """
    now = 0.0
    while True:
        match kind:
            case "poisson":
                now += draw.expovariate(rate)
                yield now
            case "constant":
                yield now
                now += 1 / rate
            case "bursts":
                for _ in range(burst_size):
                    yield now
                now += draw.expovariate(rate / burst_size)
