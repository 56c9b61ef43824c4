"""Every test with the argument `ops` runs once for each backend."""

from typing import Any

import pytest
from paged import BACKENDS, CPU_BACKENDS

from pagoda.kernels.interface import Operators


@pytest.fixture(params=BACKENDS, ids=lambda ops: ops.name)
def ops(request: pytest.FixtureRequest) -> Operators[Any, Any]:
    backend: Operators[Any, Any] = request.param
    return backend


@pytest.fixture(params=CPU_BACKENDS, ids=lambda ops: ops.name)
def cpu_ops(request: pytest.FixtureRequest) -> Operators[Any, Any]:
    backend: Operators[Any, Any] = request.param
    return backend
