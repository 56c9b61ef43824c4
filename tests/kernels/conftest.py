"""Every test with the argument `ops` runs once for each backend."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from paged import BACKENDS, CPU_BACKENDS

from pagoda.kernels.interface import Operators


@pytest.fixture(autouse=True)
def torch_keeps_its_threads() -> Iterator[None]:
    """Whatever a test makes of them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS, ids=lambda ops: ops.name)
def ops(request: pytest.FixtureRequest) -> Operators[Any, Any]:
    backend: Operators[Any, Any] = request.param
    return backend


@pytest.fixture(params=CPU_BACKENDS, ids=lambda ops: ops.name)
def cpu_ops(request: pytest.FixtureRequest) -> Operators[Any, Any]:
    backend: Operators[Any, Any] = request.param
    return backend
