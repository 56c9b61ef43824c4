"""Picks the backend, once. Nothing else in the project asks which one runs."""

import logging
import os
from typing import Any

import torch

from pagoda.kernels.cpu.build import BuildError
from pagoda.kernels.cpu.library import DTYPES, load_best
from pagoda.kernels.cpu.operators import CpuOperators
from pagoda.kernels.interface import Operators
from pagoda.kernels.torch_ops import TorchOperators

logger = logging.getLogger(__name__)


def operators_for(device: torch.device, dtype: torch.dtype, num_threads: int) -> Operators[Any, Any]:
    """The fastest operators for tensors of `dtype` on `device`; on the CPU they compute with `num_threads`.

    Builds the CPU kernels if that has not been done; where they cannot be built, warns and falls back on torch's. Also
    sets torch's own number of threads, on the CPU: to 1 if the kernels bring theirs, which torch's would only disturb.
    """
    if device.type != "cpu":
        return TorchOperators()
    num_cores = len(os.sched_getaffinity(0))
    if num_threads > num_cores:
        logger.warning("%d threads on %d cores would wait for each other: %d it is", num_threads, num_cores, num_cores)
        num_threads = num_cores
    torch.set_num_threads(num_threads)
    if dtype not in DTYPES:
        return TorchOperators()
    try:
        instruction_set, functions = load_best()
    except BuildError as error:
        logger.warning("PyTorch's operators serve, several times slower than the CPU kernels: %s", error)
        return TorchOperators()
    torch.set_num_threads(1)
    return CpuOperators(functions, instruction_set=instruction_set.name, num_threads=num_threads)
