"""Available memory, by files as Linux writes them."""

from pathlib import Path

import pytest

from pagoda.worker.memory import available_bytes

MIB = 2**20
HOST = {"proc/meminfo": "MemTotal:       24000 kB\nMemAvailable:    8192 kB\n"}


def group_v2(limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": f"{usage}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def group_v1(limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{limit}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{usage}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (HOST, 8 * MIB),
        (HOST | group_v2("max", MIB), 8 * MIB),
        (HOST | group_v2(str(5 * MIB), MIB), 4 * MIB),
        (HOST | group_v2(str(5 * MIB), 3 * MIB, 2 * MIB), 4 * MIB),
        (HOST | group_v2(str(50 * MIB), MIB), 8 * MIB),
        (HOST | group_v2(str(5 * MIB), 6 * MIB), 0),
        (group_v2(str(5 * MIB), MIB), 4 * MIB),
        (HOST | group_v1(5 * MIB, 3 * MIB, 2 * MIB), 4 * MIB),
        (HOST | group_v1(9223372036854771712, MIB), 8 * MIB),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_bytes(tmp_path) == expected


def test_this_machine_tells() -> None:
    assert 0 < (available_bytes() or 0) < 2**50
