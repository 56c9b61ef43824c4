"""Norms of every backend against the reference, and the reference by hand."""

from typing import Any

import pytest
import torch
from paged import DTYPES, REFERENCE, assert_close, random_rows

from pagoda.kernels.interface import Operators


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 96), (5, 9, 64), (3, 13)], ids=str)
def test_rms_norm_equals_reference(ops: Operators[Any, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Over rows, and over the heads of a view of a fused projection, as Qwen3 does."""
    wide = random_rows(*shape[:-1], 2 * shape[-1], dtype=dtype)
    x = wide[..., : shape[-1]]
    weight = random_rows(3, shape[-1], dtype=torch.float32)[1]
    assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_reference_rms_norm_by_hand() -> None:
    """3 and 4 have a mean square of 12.5; with eps 3.5 the root is 4."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    assert REFERENCE.rms_norm(x, weight, 3.5).tolist() == [[0.75, 2.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [96, 13])
def test_add_rms_norm_equals_reference(ops: Operators[Any, Any], size: int, dtype: torch.dtype) -> None:
    """The residual stream goes on as the sum, in float32 whatever the norm's type; x is left alone."""
    x_TE, residual_TE = random_rows(7, size, dtype=dtype), random_rows(14, size, dtype=torch.float32)[7:]
    weight_E = random_rows(3, size, dtype=torch.float32)[1]
    x_before, expected_residual_TE = x_TE.clone(), residual_TE.clone()
    actual_TE = ops.add_rms_norm(x_TE, residual_TE, weight_E, 1e-5)
    assert_close(actual_TE, REFERENCE.add_rms_norm(x_TE, expected_residual_TE, weight_E, 1e-5))
    assert actual_TE.dtype == dtype
    assert_close(residual_TE, expected_residual_TE)
    assert torch.equal(x_TE, x_before)


def test_reference_add_rms_norm_by_hand() -> None:
    """1 + 2**-9 is no bfloat16, but it is what the residual stream keeps of a bfloat16 1 and a float32 2**-9."""
    x, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(2)
    residual = torch.tensor([[2.0**-9, -1.0]])
    normed = REFERENCE.add_rms_norm(x, residual, weight, 0.0)
    assert residual.tolist() == [[1 + 2.0**-9, 0.0]]
    assert normed.tolist() == [[pytest.approx(2**0.5, rel=2**-8), 0.0]]
