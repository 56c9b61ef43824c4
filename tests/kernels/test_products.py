"""Matrix products of every backend against the reference, and what the C++ kernels promise beyond."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged import DTYPES, REFERENCE, assert_close, random_rows

from pagoda.kernels.interface import Activation, Operators

SHAPES = ((1, 576, 960), (3, 64, 33), (13, 96, 31), (25, 2050, 64), (7, 33, 48), (2400, 34, 65))
"""(T, I, O): columns that fill no panel, an odd depth, a depth and a number of rows of more than one block."""


# Thousands of float32 products of size 1/50 are summed one after the other: each sum rounds to 6e-8 of its size, 1.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9}}


def weights(num_out: int, num_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight that keeps numbers about as large as they are, and a bias."""
    generator = torch.Generator().manual_seed(2)
    weight_OI = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    return weight_OI.to(dtype), torch.randn(num_out, generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_reference(
    ops: Operators[Any, Any], shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    num_tokens, num_in, num_out = shape
    weight_OI, bias_O = weights(num_out, num_in, dtype)
    bias = bias_O if has_bias else None
    x_TI = random_rows(num_tokens + 2, num_in, dtype=dtype)[1:-1]
    expected_TO = REFERENCE.linear(x_TI, REFERENCE.pack(weight_OI, bias))
    torch.testing.assert_close(ops.linear(x_TI, ops.pack(weight_OI, bias)), expected_TO, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_float32_equals_reference(
    ops: Operators[Any, Any], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The C++ kernels round nothing; others may round to the dtype on the way. A plain product afterwards is plain."""
    num_tokens, num_in, num_out = shape
    weight_OI, bias_O = weights(num_out, num_in, dtype)
    x_TI = random_rows(num_tokens + 2, num_in, dtype=dtype)[1:-1]
    packed = ops.pack(weight_OI, bias_O)
    expected_TO = REFERENCE.linear_float32(x_TI, REFERENCE.pack(weight_OI, bias_O))
    actual_TO = ops.linear_float32(x_TI, packed)
    assert actual_TO.dtype == torch.float32
    tolerance = TOLERANCE[torch.float32 if ops.name.startswith("cpu") else dtype]
    torch.testing.assert_close(actual_TO, expected_TO, **tolerance)
    assert torch.equal(ops.linear(x_TI, packed), ops.linear(x_TI, ops.pack(weight_OI, bias_O)))


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 96), (7, 2050, 32), (30, 33, 17)], ids=str)
def test_gated_linear_equals_reference(
    ops: Operators[Any, Any], shape: tuple[int, int, int], dtype: torch.dtype, activation: Activation, has_bias: bool
) -> None:
    """The gate's rows come first."""
    num_tokens, num_in, num_out = shape
    weight_FI, bias_F = weights(2 * num_out, num_in, dtype)
    bias = bias_F if has_bias else None
    x_TI = random_rows(num_tokens + 2, num_in, dtype=dtype)[1:-1]
    expected_TF = REFERENCE.gated_linear(x_TI, REFERENCE.pack_gated(weight_FI, bias, activation))
    # Torch rounds gate and up to bfloat16 before it multiplies them: three roundings of 2**-9 instead of one.
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    actual_TF = ops.gated_linear(x_TI, ops.pack_gated(weight_FI, bias, activation))
    torch.testing.assert_close(actual_TF, expected_TF, **tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_any_size(ops: Operators[Any, Any], activation: Activation) -> None:
    """Where the exponential overflows, gates give 0 or themselves, never NaN."""
    gates = torch.tensor([0.0, 1.0, -1.0, 90.0, -90.0, 1e4, -1e4, 3e38, -3e38])[:, None]
    weight = torch.cat((gates, torch.ones_like(gates)))
    packed = ops.pack_gated(F.pad(weight, (0, 1)), None, activation)
    actual = ops.gated_linear(torch.tensor([[1.0, 0.0]]), packed)
    activate = F.silu if activation == "silu" else lambda x: F.gelu(x.double(), approximate="tanh").float()
    assert_close(actual[0], activate(gates[:, 0]))


def test_reference_gates_by_hand() -> None:
    """silu(0) = 0, silu of something large is itself, of something very negative 0; gelu(1) = 0.8412."""
    weight = torch.tensor([[0.0], [200.0], [-200.0], [1.0], [3.0], [3.0], [3.0], [1.0]])
    for activation, last in (("silu", 1 / (1 + torch.e**-1)), ("gelu_tanh", 0.841192)):
        packed = REFERENCE.pack_gated(weight, None, activation)  # type: ignore[arg-type]
        assert REFERENCE.gated_linear(torch.ones(1, 1), packed)[0].tolist() == pytest.approx([0, 600, 0, last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_kernels_do_not_see_the_batch(cpu_ops: Operators[Any, Any], dtype: torch.dtype) -> None:
    """A row alone, in any batch: the very same bits, though other batches are cut into other groups of rows."""
    weight_OI, bias_O = weights(70, 2050, dtype)
    packed = cpu_ops.pack(weight_OI, bias_O)
    x_TI = random_rows(300, 2050, dtype=dtype)
    whole_TO = cpu_ops.linear(x_TI, packed)
    for num_rows in (1, 2, 5, 12, 13, 40, 193):
        assert torch.equal(cpu_ops.linear(x_TI[:num_rows], packed), whole_TO[:num_rows])
        assert torch.equal(cpu_ops.linear(x_TI[-num_rows:], packed), whole_TO[-num_rows:])


def test_strided_rows(cpu_ops: Operators[Any, Any]) -> None:
    """Rows that are views of wider ones, and columns that are not side by side."""
    weight_OI, _ = weights(40, 64, torch.float32)
    packed, wide = cpu_ops.pack(weight_OI, None), random_rows(9, 128, dtype=torch.float32)
    for x_TI in (wide[:, :64], wide[:, ::2], wide[::3, 64:]):
        assert torch.equal(cpu_ops.linear(x_TI, packed), cpu_ops.linear(x_TI.contiguous(), packed))
