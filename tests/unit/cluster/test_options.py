"""What options are turned into."""

import os
from typing import Any

import pytest

from pagoda.cluster.commands.options import share_cores


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "num_ranks", "num_threads"),
    [(16, 1, 1, 16), (16, 2, 1, 8), (16, 2, 2, 4), (16, 3, 2, 2), (2, 2, 3, 1), (None, 1, 1, 1), (16, 0, 0, 16)],
)
def test_cores_are_shared_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, num_cores: int | None, num_workers: int, num_ranks: int, num_threads: int
) -> None:
    """At least one each; numbers that are refused later are no reason to fail here."""
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    options: dict[str, Any] = {"num_threads": None, "tensor_parallel_size": num_ranks}
    share_cores(options, num_workers=num_workers)
    assert options["num_threads"] == num_threads


def test_threads_that_were_asked_for_stay() -> None:
    options: dict[str, Any] = {"num_threads": 7, "tensor_parallel_size": 2}
    share_cores(options, num_workers=2)
    assert options["num_threads"] == 7
