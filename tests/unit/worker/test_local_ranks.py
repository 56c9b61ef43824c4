"""Which rank gets which device of this machine."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.worker import local_ranks
from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import ConfigError
from pagoda.worker.local_ranks import LocalRanks
from pagoda.worker.rank_link import RankSeat
from pagoda.worker.tensor_parallel import OtherRanks, RankPlaces, RankProcesses

SEATS = [RankSeat(rank, 3, "127.0.0.1", 1, b"token") for rank in (1, 2)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(rank, device) of what would be started on a machine with four GPUs."""
    found: list[tuple[int, str]] = []

    def start(config: EngineConfig, seat: RankSeat) -> Any:
        found.append((seat.rank, config.device))

    monkeypatch.setattr(local_ranks, "_start", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return found


@pytest.mark.parametrize(
    ("first", "others"),
    [("cpu", ["cpu", "cpu"]), ("cuda", ["cuda:1", "cuda:2"]), ("cuda:1", ["cuda:2", "cuda:3"])],
)
def test_devices_come_after_the_first_ones(started: list[tuple[int, str]], first: str, others: list[str]) -> None:
    LocalRanks(EngineConfig(Path("model"), device=first), SEATS)
    assert started == list(zip((1, 2), others, strict=True))


def test_more_ranks_than_gpus_are_refused_before_one_starts(started: list[tuple[int, str]]) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 3 ranks from cuda:2 on .* 4 GPUs"):
        LocalRanks(EngineConfig(Path("model"), device="cuda:2"), SEATS)
    assert not started


def test_nobody_listens_for_ranks_that_are_not_started() -> None:
    """A socket that is left is a warning, and so an error here."""
    config = EngineConfig(Path("model"), device="cpu", tensor_parallel_size=2)
    ports: list[int] = []

    def refuse(_: EngineConfig, seats: Sequence[RankSeat]) -> RankProcesses:
        ports.append(seats[0].port)
        raise ConfigError("device", "there is none")

    with pytest.raises(ConfigError, match="there is none"):
        OtherRanks(config, RankPlaces("127.0.0.1", refuse))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 10.0)
