"""Ranks as processes of this machine."""

import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import ConfigError
from pagoda.worker.parallel import device_of_rank
from pagoda.worker.rank_link import RankSeat
from pagoda.worker.tensor_parallel import RankPlaces

_STANDARD_ERROR = 2


class LocalRanks:
    """Implements `RankProcesses`."""

    def __init__(self, config: EngineConfig, seats: Sequence[RankSeat]) -> None:
        """On GPUs each rank gets the one as many places after the first rank's."""
        first = torch.device(config.device)
        if first.type == "cuda" and (first.index or 0) + len(seats) >= torch.cuda.device_count():
            raise ConfigError(
                "tensor_parallel_size",
                f"{len(seats) + 1} ranks from {first} on are more than the {torch.cuda.device_count()} GPUs there are",
            )
        self._reaping = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for seat in seats:
            device = device_of_rank(first, seat.rank)
            self._processes[seat.rank] = _start(replace(config, device=str(device)), seat)

    def problem(self, suspect: int | None = None) -> str | None:
        with self._reaping:
            for rank, process in sorted(self._processes.items(), key=lambda item: item[0] != suspect):
                if (status := process.poll()) is not None:
                    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                    return f"the process of rank {rank} {how}"
        return None

    def kill(self) -> None:
        with self._reaping:
            for process in self._processes.values():
                process.kill()
            for process in self._processes.values():
                process.wait()


def _start(config: EngineConfig, seat: RankSeat) -> "subprocess.Popen[bytes]":
    """What it is to be goes through a pipe, so that nobody sees the token in its command line.

    It is in a process group of its own: what the terminal sends to this one, it would act on too soon. Standard output
    belongs to whoever reads our results.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "pagoda.worker.rank_process"],
        stdin=subprocess.PIPE,
        stdout=_STANDARD_ERROR,
        process_group=0,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # it has ended already: `problem` says how
        pickle.dump((config, seat), pipe)
    return process


LOCAL_RANKS = RankPlaces("127.0.0.1", LocalRanks)
"""For a worker without Ray."""
