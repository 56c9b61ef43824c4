"""Processes as their victims and their witnesses see them: killed, paused, counted."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """What some processes take."""

    rss_bytes: int = 0
    num_files: int = 0
    num_threads: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.rss_bytes + other.rss_bytes, self.num_files + other.num_files, self.num_threads + other.num_threads
        )


def kill(process: int) -> bool:
    """End it without a word. False if it had ended already."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
        return True
    return False


@contextmanager
def paused(process: int) -> Iterator[None]:
    """Within, it stands still; if it ends meanwhile, that is no error."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def usage_of(process: int) -> Usage:
    """All nothing once it has ended."""
    folder = Path(f"/proc/{process}")
    with suppress(OSError, IndexError):
        num_files = len(list((folder / "fd").iterdir()))
        num_threads = int((folder / "stat").read_text().rpartition(")")[2].split()[17])
        return Usage(int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES, num_files, num_threads)
    return Usage()


def children_of(process: int) -> list[int]:
    """Ids of its children and their children, as far as they live."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it ended meanwhile
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, young = [], {process}
    while young:
        young = {child for child, parent in parents.items() if parent in young}
        found += young
    return sorted(found)


def command_of(process: int) -> str:
    """Its command line, words parted by spaces; empty once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def start_time_of(process: int) -> int:
    """Clock ticks since the machine started; so processes can be ordered by age."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return 0
