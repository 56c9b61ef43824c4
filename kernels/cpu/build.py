"""Compiles the C++ kernels, once for each instruction set and state of the sources.

`python -m pagoda.kernels.cpu` builds the library of this machine ahead of time; without it the first engine does.
The result lies in the user's cache folder under a name that tells what went into it, and serves without a compiler.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
"""Tried in this order."""
_COMPILE_LIMIT_S = 300
_CHECKSUM_BYTES = 32
_FLAGS = ("-O3", "-std=c++20", "-pthread", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")


class BuildError(Exception):
    """The kernels could not be built; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What a library is compiled for, and what /proc/cpuinfo must list for it to run."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]


_V3 = frozenset({"avx2", "fma", "bmi2", "f16c"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_V4_BF16 = _V4 | {"avx512_bf16"}

INSTRUCTION_SETS = (
    InstructionSet(
        "amx",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DPAGODA_AMX"),
        _V4_BF16 | {"amx_tile", "amx_bf16"},
    ),
    InstructionSet("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4_BF16),
    InstructionSet("avx512", ("-march=x86-64-v4",), _V4),
    InstructionSet("avx2", ("-march=x86-64-v3",), _V3),
    InstructionSet("portable", (), frozenset()),
)
"""Best first."""


@cache
def cpu_flags() -> frozenset[str]:
    """What this machine's cores can do; empty where Linux does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines() if cpuinfo.exists() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def supported_instruction_sets() -> list[InstructionSet]:
    """Those that run on this machine, best first."""
    return [candidate for candidate in INSTRUCTION_SETS if candidate.cpu_flags <= cpu_flags()]


def default_folder() -> Path:
    """In the user's cache. Raises `BuildError` if the user has no home."""
    try:
        return Path.home() / ".cache" / "pagoda" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"there is no folder to keep them in: {error}; set HOME") from error


def library(instruction_set: InstructionSet, folder: Path | None = None) -> Path:
    """The compiled library, built if `folder`, by default `default_folder`, does not have it. Raises `BuildError`."""
    folder = folder or default_folder()
    path = _path(instruction_set, folder)
    if _is_whole(path):  # without a compiler, or where nothing can be written, this is enough
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # workers that start together build once
            if not _is_whole(path):
                _build(instruction_set, path)
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error}") from error
    return path


def is_built(instruction_set: InstructionSet, folder: Path | None = None) -> bool:
    """Whether `library` has nothing to do. Raises `BuildError` if it has nowhere to look."""
    return _is_whole(_path(instruction_set, folder or default_folder()))


def compilers() -> list[str]:
    """Those that are here, in the order in which they are tried. Raises `BuildError` if there is none."""
    found = [compiler for name in _COMPILERS if (compiler := shutil.which(name))]
    if not found:
        raise BuildError(f"there is no C++ compiler: none of {', '.join(_COMPILERS)} is on the path")
    return found


def _path(instruction_set: InstructionSet, folder: Path) -> Path:
    digest = hashlib.sha256("\0".join((*_FLAGS, *instruction_set.compiler_flags)).encode())
    for source in [*sorted(SOURCES.glob("*.h")), SOURCES / "kernels.cpp"]:
        digest.update(source.read_bytes())
    return folder / f"{instruction_set.name}-{digest.hexdigest()[:16]}.so"


def _is_whole(path: Path) -> bool:
    """Whether the file is there and ends with its own checksum: to load a damaged library kills the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_CHECKSUM_BYTES:] == hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest()


def _build(instruction_set: InstructionSet, path: Path) -> None:
    """Compile with the first compiler that can. No other process does the same; `path` never is half a library."""
    unfinished = path.with_suffix(".unfinished")
    failures = []
    for compiler in compilers():
        try:
            _compile([compiler, *_FLAGS, *instruction_set.compiler_flags, str(SOURCES / "kernels.cpp")], unfinished)
            _add_checksum(unfinished)
            unfinished.rename(path)
            return
        except BuildError as error:
            failures.append(error)
        finally:
            unfinished.unlink(missing_ok=True)
    raise failures[0]


def _add_checksum(path: Path) -> None:
    """At the end, where loaders do not look."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _compile(command: list[str], path: Path) -> None:
    try:
        subprocess.run(
            [*command, "-o", str(path)], check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        errors = [line for line in lines if "error" in line] or lines[-1:] or [f"exit status {error.returncode}"]
        raise BuildError(f"{command[0]} failed: {errors[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {_COMPILE_LIMIT_S} s") from error
    if not path.exists():
        raise BuildError(f"{command[0]} ended well, but wrote no library")
