"""A disk that can be full: a small tmpfs, and a file that takes what is left of it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FILLER = "filler"
_PIECE_BYTES = 2**20


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """An empty file system of so many bytes at `folder`. Raises `PermissionError` where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "pagoda-faults", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError("there is no mount command") from error
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave not a byte."""
    with (folder / _FILLER).open("wb", buffering=0) as file, suppress(OSError):  # ENOSPC is what we want
        for size in (_PIECE_BYTES, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def empty(folder: Path) -> None:
    """Give back what `fill` has taken."""
    (folder / _FILLER).unlink(missing_ok=True)
