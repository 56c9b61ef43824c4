"""Building the C++ kernels: once, again when something changes, and what happens where it cannot be done."""

import logging
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagoda.kernels.cpu import build
from pagoda.kernels.cpu.build import BuildError, library, supported_instruction_sets
from pagoda.kernels.cpu.library import load_best
from pagoda.kernels.cpu.operators import CpuOperators
from pagoda.kernels.dispatch import operators_for
from pagoda.kernels.torch_ops import TorchOperators

PORTABLE = build.INSTRUCTION_SETS[-1]


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the kernels: a header and a file that compile in no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "number.h").write_text("constexpr int NUMBER = 1;\n")
    (folder / "kernels.cpp").write_text('#include "number.h"\nextern "C" int number() { return NUMBER; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_what_is_built_stays(small_sources: Path, tmp_path: Path) -> None:
    """The second call compiles nothing, also if other workers make it."""
    del small_sources
    assert not build.is_built(PORTABLE, tmp_path)
    path = library(PORTABLE, tmp_path)
    assert build.is_built(PORTABLE, tmp_path)
    before = path.stat()
    assert library(PORTABLE, tmp_path) == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_changed_sources_are_built_anew(small_sources: Path, tmp_path: Path) -> None:
    """A header counts as much as the file that includes it."""
    first = library(PORTABLE, tmp_path)
    (small_sources / "number.h").write_text("constexpr int NUMBER = 2;\n")
    assert not build.is_built(PORTABLE, tmp_path)
    assert library(PORTABLE, tmp_path) != first


def test_workers_that_start_together_build_once(tmp_path: Path) -> None:
    """Two processes at once: both get a whole library, and nothing else is left lying about."""
    script = f"""
from collections.abc import Callable
from pathlib import Path
from pagoda.kernels.cpu import build
print(build.library(build.INSTRUCTION_SETS[-1], Path({str(tmp_path)!r})))
"""
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(paths) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"lock", Path(paths.pop()).name}


def test_what_does_not_compile_is_said(small_sources: Path, tmp_path: Path) -> None:
    """The first error of the compiler, and no half a library."""
    (small_sources / "kernels.cpp").write_text("int broken() { return nothing; }\n")
    with pytest.raises(BuildError, match="nothing"):
        library(PORTABLE, tmp_path)
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.parametrize("damage", [lambda _: b"", lambda old: old[: len(old) // 2], lambda old: old[:-99] + bytes(99)])
def test_what_is_damaged_is_built_anew(small_sources: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A full disk, or a machine that lost its power: to load such a file would kill every process that tries."""
    del small_sources
    path = library(PORTABLE, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert not build.is_built(PORTABLE, tmp_path)
    assert library(PORTABLE, tmp_path).read_bytes() == whole


def test_what_is_built_needs_no_compiler_and_writes_nothing(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was built elsewhere and runs on a read-only disk."""
    del small_sources
    path = library(PORTABLE, tmp_path)
    (tmp_path / "lock").unlink()
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert library(PORTABLE, tmp_path) == path
    assert not (tmp_path / "lock").exists()


def compiler(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "failed: exit status 3"), ("exit 0", "wrote no library"), ("echo no >&2; exit 1", "no")],
)
def test_a_compiler_that_does_not_work(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """The next one is asked; if none works, it is said why the first does not."""
    del small_sources
    broken = compiler(tmp_path, "broken", script)
    monkeypatch.setattr(build, "_COMPILERS", (broken, *build._COMPILERS))
    assert library(PORTABLE, tmp_path / "one").exists()
    monkeypatch.setattr(build, "_COMPILERS", (broken,))
    with pytest.raises(BuildError, match=f"{broken}.* {said}"):
        library(PORTABLE, tmp_path / "two")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="file"):
        library(PORTABLE, tmp_path / "file")


def test_without_a_compiler_torch_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, that names what is missing."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("pagoda.kernels.cpu.library.library", lambda of: library(of, tmp_path))
    with caplog.at_level(logging.WARNING):
        assert isinstance(operators_for(torch.device("cpu"), torch.bfloat16, 2), TorchOperators)
    assert ["c++" in record.getMessage() for record in caplog.records] == [True]


def test_without_a_home_torch_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As for a user whom the system does not know."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert isinstance(operators_for(torch.device("cpu"), torch.bfloat16, 2), TorchOperators)
    assert ["set HOME" in record.getMessage() for record in caplog.records] == [True]


def test_compiler_that_does_not_know_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next best is used, and nobody is warned."""
    unknown = build.InstructionSet("future", ("-march=future",), frozenset())
    monkeypatch.setattr("pagoda.kernels.cpu.library.supported_instruction_sets", lambda: [unknown, PORTABLE])
    assert load_best()[0] is PORTABLE


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They would spin for each other; and so many that the system refuses one end the process."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3})
    with caplog.at_level(logging.WARNING):
        operators_for(torch.device("cpu"), torch.float16, 4000)
    assert torch.get_num_threads() == 2
    assert ["4000 threads on 2 cores" in record.getMessage() for record in caplog.records] == [True]


def test_which_operators_serve() -> None:
    """The C++ kernels on the CPU for the types they know, then torch has one thread; torch's for all else."""
    for dtype in (torch.float32, torch.bfloat16):
        operators = operators_for(torch.device("cpu"), dtype, 2)
        assert isinstance(operators, CpuOperators)
        assert operators.name == f"cpu-{supported_instruction_sets()[0].name}"
        assert torch.get_num_threads() == 1
    assert isinstance(operators_for(torch.device("cpu"), torch.float16, 2), TorchOperators)
    assert torch.get_num_threads() == 2
    assert isinstance(operators_for(torch.device("meta"), torch.float32, 2), TorchOperators)


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (set(), "portable"),
        ({"avx2", "fma", "bmi2", "f16c"}, "avx2"),
        ({"avx2", "fma", "bmi2", "f16c", "avx512f", "avx512_bf16"}, "avx2"),
        ({*build.INSTRUCTION_SETS[2].cpu_flags}, "avx512"),
        ({*build.INSTRUCTION_SETS[1].cpu_flags, "more"}, "avx512bf16"),
        ({*build.INSTRUCTION_SETS[0].cpu_flags}, "amx"),
    ],
)
def test_the_best_that_a_cpu_can_do(flags: set[str], best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the CPU lists in full; the portable kernels run anywhere."""
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(flags))
    assert supported_instruction_sets()[0].name == best
    assert supported_instruction_sets()[-1].name == "portable"


@pytest.mark.parametrize("instruction_set", build.INSTRUCTION_SETS, ids=lambda instruction_set: instruction_set.name)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instruction sets of x86-64")
def test_every_instruction_set_compiles(instruction_set: build.InstructionSet) -> None:
    """Also those that this machine cannot run."""
    assert library(instruction_set).exists()
