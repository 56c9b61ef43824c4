"""What a service takes, looked at again and again while it is mistreated; and a plot of it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from processes import Usage
from served import Held, ServedCluster

matplotlib.use("svg")
import matplotlib.pyplot as plt

PERIOD_S = 3.0
_SHARE = 0.25
"""Of the samples, at the end; compared with as many in the middle."""


@dataclass(slots=True)
class Samples:
    """One a period; times are seconds since the first one."""

    at_s: list[float] = field(default_factory=list)
    usage: list[dict[str, Usage]] = field(default_factory=list)
    held: list[Held | None] = field(default_factory=list)
    num_workers: list[int] = field(default_factory=list)

    async def take(self, service: ServedCluster) -> None:
        """Go on until cancelled."""
        begin_s = time.monotonic()
        while True:
            usage = await asyncio.to_thread(service.usage)
            self.at_s.append(time.monotonic() - begin_s)
            self.usage.append(usage)
            self.num_workers.append(len(service.processes("worker")))
            self.held.append(await service.held())
            await asyncio.sleep(PERIOD_S)

    def growth_ratio(self, measure: Callable[[Usage], int]) -> float:
        """Of the median of the last samples to that of as many from the middle of the test on."""
        values = [measure(usage["all"]) for usage in self.usage]
        size = max(1, int(len(values) * _SHARE))
        middle = values[len(values) // 2 - size : len(values) // 2] or values[:1]
        return _median(values[-size:]) / max(1.0, _median(middle))

    def plot(self, path: Path, marks: Sequence[tuple[float, str]]) -> None:
        """`marks` are times of faults, and their kinds."""
        figure, axes = plt.subplots(4, 1, figsize=(10, 9), sharex=True)
        for role in self.usage[0]:
            axes[0].plot(self.at_s, [usage[role].rss_bytes / 2**20 for usage in self.usage], label=role)
        axes[0].set_ylabel("RSS, MiB")
        axes[0].legend(fontsize="small", ncols=5, loc="lower left")
        axes[1].plot(self.at_s, [usage["all"].num_files for usage in self.usage], label="files")
        axes[1].plot(self.at_s, [usage["all"].num_threads for usage in self.usage], label="threads")
        axes[1].legend(fontsize="small", loc="lower left")
        held = [(at_s, each) for at_s, each in zip(self.at_s, self.held, strict=True) if each is not None]
        axes[2].plot([at_s for at_s, _ in held], [each.num_blocks for _, each in held], label="blocks held")
        axes[2].plot([at_s for at_s, _ in held], [each.num_reservations for _, each in held], label="reservations")
        axes[2].legend(fontsize="small", loc="upper left")
        axes[3].step(self.at_s, self.num_workers, label="workers")
        kinds = sorted({kind for _, kind in marks})
        for place, kind in enumerate(kinds):
            times = [at_s for at_s, each in marks if each == kind]
            axes[3].plot(times, [-1 - place] * len(times), "|", markersize=10, label=kind)
        axes[3].legend(fontsize="small", ncols=4, loc="upper left", bbox_to_anchor=(0, -0.2))
        axes[3].set_xlabel("s")
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


def _median(values: Sequence[int]) -> float:
    return float(sorted(values)[len(values) // 2])
