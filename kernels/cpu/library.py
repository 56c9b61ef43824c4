"""The compiled kernels as Python functions. Mirrors the structures of the headers, field by field."""

import ctypes
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagoda.kernels.cpu.build import BuildError, InstructionSet, library, supported_instruction_sets

logger = logging.getLogger(__name__)

DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class LinearArguments(ctypes.Structure):
    """`LinearArguments` of linear.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("depth", c_int64),
        ("x_stride", c_int64),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("columns", c_int64),
        ("activation", c_int64),
        ("wide_out", c_void_p),
    )


class RopeArguments(ctypes.Structure):
    """`RopeArguments` of elementwise.h."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("cache", c_void_p),
        ("block_size", c_int64),
        ("block_stride", c_int64),
    )


class AttentionArguments(ctypes.Structure):
    """`AttentionArguments` of attention.h."""

    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("cache", c_void_p),
        ("block_table", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("requests", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("q_stride", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("table_stride", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int64),
        ("sinks", c_int64),
    )


class AttentionBlock(ctypes.Structure):
    """`AttentionBlock` of blocks.h."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("rope", c_void_p),
        ("attention", c_void_p),
        ("scratch", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("hidden", c_int64),
        ("eps", c_float),
    )


class FeedForwardBlock(ctypes.Structure):
    """`FeedForwardBlock` of blocks.h."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("norm", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("scratch", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("hidden", c_int64),
        ("eps", c_float),
    )


class SamplingArguments(ctypes.Structure):
    """`SamplingArguments` of sampling.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("temperature", c_void_p),
        ("streams", c_void_p),
        ("tokens", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
    )


_NORM = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "pack_gated": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "linear": (c_void_p, c_int),
    "rms_norm": _NORM,
    "add_rms_norm": (c_void_p, *_NORM),
    "rope_kv_write": (c_void_p, c_int),
    "attend": (c_void_p, c_int),
    "attention_block": (c_void_p, c_int),
    "feed_forward_block": (c_void_p, c_int),
    "sample": (c_void_p, c_int),
}


class Functions(NamedTuple):
    """The kernels for one dtype. Pointers are `data_ptr()`s; the last argument is the number of threads."""

    pack: Any
    pack_gated: Any
    linear: Any
    rms_norm: Any
    add_rms_norm: Any
    rope_kv_write: Any
    attend: Any
    attention_block: Any
    feed_forward_block: Any
    sample: Any


def load(path: Path) -> dict[torch.dtype, Functions]:
    """The functions of a library made by `build.py`, by dtype. Raises OSError if this machine cannot run them."""
    library = ctypes.CDLL(str(path))
    library.pagoda_enable.restype = ctypes.c_bool
    if not library.pagoda_enable():
        raise OSError(f"{path.name}: Linux does not let this process use the CPU's matrix tiles")

    def function(name: str, dtype: str) -> Any:
        found = getattr(library, f"pagoda_{name}_{dtype}")
        found.argtypes, found.restype = _SIGNATURES[name], None
        return found

    return {
        dtype: Functions(*(function(name, suffix) for name in Functions._fields)) for dtype, suffix in DTYPES.items()
    }


def load_best() -> tuple[InstructionSet, dict[torch.dtype, Functions]]:
    """The functions for the best instruction set that can be compiled and run here.

    Raises `BuildError`, with what the best one failed of, if none can.
    """
    failures = []
    for instruction_set in supported_instruction_sets():
        try:
            return instruction_set, load(library(instruction_set))
        except (BuildError, OSError) as error:  # an old compiler does not know what the CPU can
            logger.info("no CPU kernels for %s: %s", instruction_set.name, error)
            failures.append(error)
    raise BuildError(str(failures[0])) from failures[0]
