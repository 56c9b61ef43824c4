"""What the C++ kernels refuse before they read or write memory that is not meant."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged import CPU_BACKENDS, P, lay_out, plain_kind, random_contexts

from pagoda.kernels.cpu.operators import CpuOperators
from pagoda.kernels.interface import AttentionKind

OPS: Any = CPU_BACKENDS[-1]
BF16 = torch.bfloat16
HEADS = (4, 2, 16)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def rope_kv_write(**changes: torch.Tensor) -> Any:
    paged = lay_out(random_contexts([(0, 3)], HEADS))
    tensors = {
        "q_THD": ones(3, 4, 16),
        "k_TKD": ones(3, 2, 16),
        "v_TKD": ones(3, 2, 16),
        "cos_TD": ones(3, 16),
        "sin_TD": ones(3, 16),
        "cache_N2PKD": paged.layer_N2PKD,
    } | changes
    return OPS.rope_kv_write(*tensors.values(), OPS.plan(paged.batch, P, torch.float32))


def attend(q_THD: torch.Tensor, *, block_size: int = P, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    paged = lay_out(random_contexts([(0, 3)], HEADS))
    cache_N2PKD = changes["cache"](paged.layer_N2PKD) if changes else paged.layer_N2PKD
    return OPS.attend(q_THD, cache_N2PKD, OPS.plan(paged.batch, block_size, torch.float32), plain_kind(16))


def sample(**changes: torch.Tensor) -> torch.Tensor:
    tensors = {
        "logits_BV": ones(2, 9),
        "temperature_B": ones(2),
        "streams_B": ones(2, dtype=torch.int64),
    } | changes
    return OPS.sample(*tensors.values())


WEIGHT = OPS.pack(ones(40, 9), None)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype of a weight": (lambda: OPS.pack(ones(40, 9, dtype=torch.float16), None), "weight: dtype"),
    "size of a bias": (lambda: OPS.pack(ones(40, 9), ones(8)), "bias_O: must be of shape"),
    "size of a gated bias": (lambda: OPS.pack_gated(ones(40, 9), ones(20), "silu"), "bias_F: must be of shape"),
    "dtype of x": (lambda: OPS.linear(ones(2, 9, dtype=BF16), WEIGHT), "x_TI: must be torch.float32"),
    "x too wide": (lambda: OPS.linear(ones(2, 10), WEIGHT), "x_TI: must be of shape"),
    "x too narrow": (lambda: OPS.linear_float32(ones(2, 8), WEIGHT), "x_TI: must be of shape"),
    "dtype of a norm": (lambda: OPS.rms_norm(ones(2, 8), ones(8, dtype=BF16), 1e-5), "weight: must be torch.float32"),
    "size of a norm": (lambda: OPS.rms_norm(ones(2, 8), ones(7), 1e-5), "weight: must be of shape"),
    "strides of a norm": (lambda: OPS.rms_norm(ones(2, 8), ones(16)[::2], 1e-5), "weight: must be contiguous"),
    "dtype of a residual": (
        lambda: OPS.add_rms_norm(ones(2, 8, dtype=BF16), ones(2, 8, dtype=BF16), ones(8), 1e-5),
        "residual_TE: must be torch.float32",
    ),
    "size of a residual": (lambda: OPS.add_rms_norm(ones(2, 8), ones(1, 8), ones(8), 1e-5), "residual_TE: must be of"),
    "dtype of keys": (lambda: rope_kv_write(k_TKD=ones(3, 2, 16, dtype=BF16)), "k_TKD: must be torch.float32"),
    "number of values": (lambda: rope_kv_write(v_TKD=ones(2, 2, 16)), "v_TKD: must be of shape"),
    "dtype of angles": (lambda: rope_kv_write(cos_TD=ones(3, 16, dtype=BF16)), "cos_TD: must be torch.float32"),
    "strides of angles": (lambda: rope_kv_write(sin_TD=ones(3, 32)[:, ::2]), "sin_TD: must be contiguous"),
    "heads of a cache": (lambda: rope_kv_write(cache_N2PKD=ones(4, 2, P, 3, 16)), "cache_N2PKD: must be of shape"),
    "dtype of queries": (lambda: attend(ones(3, 4, 16, dtype=BF16)), "cache_N2PKD: must be torch.bfloat16"),
    "number of heads": (lambda: attend(ones(3, 3, 16)), "q_THD: 3 heads"),
    "block size": (lambda: attend(ones(3, 4, 16), block_size=P + 1), "cache_N2PKD: must be of shape"),
    "odd size of a head": (
        lambda: attend(ones(3, 4, 7, dtype=BF16), cache=lambda _: ones(4, 2, P, 2, 7, dtype=BF16)),
        "q_THD: in bfloat16 the size of a head must be even",
    ),
    "layout of a cache": (
        lambda: attend(ones(3, 4, 16), cache=lambda cache: cache.transpose(2, 3).contiguous().transpose(2, 3)),
        "cache_N2PKD: must be contiguous",
    ),
    "dtype of logits": (lambda: sample(logits_BV=ones(2, 9, dtype=torch.float16)), "logits_BV: dtype"),
    "layout of logits": (lambda: sample(logits_BV=ones(9, 2).T), "logits_BV: must be contiguous"),
    "number of temperatures": (lambda: sample(temperature_B=ones(3)), "temperature_B: must be of shape"),
    "dtype of streams": (lambda: sample(streams_B=ones(2)), "streams_B: must be torch.int64"),
    "no thread": (lambda: CpuOperators({}, instruction_set="none", num_threads=0), "num_threads: must be at least 1"),
}


@pytest.mark.parametrize(("call", "said"), CALLS.values(), ids=CALLS)
def test_tensor_that_does_not_fit_is_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        call()


def test_the_same_calls_with_tensors_that_fit() -> None:
    """Else the ones above may fail for another reason."""
    assert OPS.linear(ones(2, 9), WEIGHT).tolist() == [[9.0] * 40] * 2
    assert rope_kv_write().shape == (3, 4, 16)
    assert attend(ones(3, 4, 16)).shape == (3, 4, 16)
    assert sample().shape == (2,)


@pytest.mark.parametrize("field", ["window", "num_sinks", "soft_cap"])
def test_kind_that_is_none(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must not be negative, got -1"):
        replace(AttentionKind(scale=1.0), **{field: -1})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_scale_that_is_none(scale: float) -> None:
    with pytest.raises(ValueError, match=r"^scale: must be above 0"):
        AttentionKind(scale=scale)
