"""Compiles the C++ kernels, once for each instruction set, compiler and state of the sources.

`python -m pagoda.kernels.cpu` builds the library of this machine ahead of time; without it the first engine does.
The result lies in the user's cache folder under a name that tells all that went into it, so it never goes stale.
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
DEFAULT_FOLDER = Path.home() / ".cache" / "pagoda" / "kernels"
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_LIMIT_S = 300
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


def library(instruction_set: InstructionSet, folder: Path = DEFAULT_FOLDER) -> Path:
    """The compiled library, built if `folder` does not have it. Raises `BuildError`."""
    command = _command(instruction_set)
    path = folder / f"{instruction_set.name}-{_digest(command)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # workers that start together build once
            if not path.exists():
                _compile(command, path)
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error}") from error
    return path


def is_built(instruction_set: InstructionSet, folder: Path = DEFAULT_FOLDER) -> bool:
    """Whether `library` has nothing to do. Raises `BuildError` if there is no compiler."""
    return (folder / f"{instruction_set.name}-{_digest(_command(instruction_set))}.so").exists()


def _command(instruction_set: InstructionSet) -> list[str]:
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler: none of {', '.join(_COMPILERS)} is on the path")
    return [compiler, *_FLAGS, *instruction_set.compiler_flags, str(SOURCES / "kernels.cpp")]


def _compile(command: list[str], path: Path) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [*command, "-o", str(unfinished)], check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S
        )
        unfinished.rename(path)
    except subprocess.CalledProcessError as error:
        errors = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()[-1:]
        raise BuildError(f"{command[0]} failed: {' '.join(errors[:1])}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {_COMPILE_LIMIT_S} s") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _digest(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], check=False, capture_output=True, timeout=60).stdout
    digest = hashlib.sha256(version + "\0".join(command).encode())
    for source in [*sorted(SOURCES.glob("*.h")), SOURCES / "kernels.cpp"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
