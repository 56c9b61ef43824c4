"""How much memory a process may still take on this host."""

from pathlib import Path

_UNLIMITED = 2**60
"""Version 1 of control groups says "no limit" with a number of about this size."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping: the host's and the control group's, whichever is less.

    None where the system does not tell. `root` is where the file system begins.
    """
    known = [value for value in (_of_host(root), _of_control_group(root)) if value is not None]
    return min(known, default=None)


def _of_host(root: Path) -> int | None:
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _of_control_group(root: Path) -> int | None:
    """Of the group that a container sees as its own root, by version 2 or version 1 of control groups.

    What files in memory take can be had back. Source: the kernel's Documentation/admin-guide/cgroup-v2.rst.
    """
    for folder, limit_file, usage_file, cached in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = ((folder / name).read_text(encoding="ascii").strip() for name in (limit_file, usage_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        except OSError:
            continue
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        return max(0, int(limit) - int(usage) + int(stat.get(cached, 0)))
    return None
