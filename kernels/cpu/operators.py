"""The operators of the C++ kernels. Checks dtypes, shapes and strides, hands over pointers.

What tensors hold is not checked: block ids, slots and lengths must be right. The halves of a layer check x, the
residual stream and the cache; norms, head counts and angles are the model's, the same at every call, and trusted.

Dimensions as in `interface.py`. What a request gets does not depend on what else is in its batch, on how its prompt was
cut into steps, or on the number of threads: every sum has one fixed order.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from pagoda.kernels import blocks
from pagoda.kernels.cpu.library import (
    AttentionArguments,
    AttentionBlock,
    FeedForwardBlock,
    Functions,
    LinearArguments,
    RopeArguments,
    SamplingArguments,
)
from pagoda.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionKind,
    AttentionWeights,
    FeedForwardWeights,
)
from pagoda.kernels.torch_ops import TorchOperators

PANEL = 32
"""Columns of a packed panel, as in panel.h."""
_ACTIVATIONS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels, with the arguments of its product filled in but for x and the result."""

    dtype: torch.dtype
    num_in: int
    num_padded: int
    """`num_in`, made even: rows of x must be as long, which within the halves of a layer they are not."""
    num_out: int
    arguments: LinearArguments
    address: int
    run: Any
    memory: tuple[torch.Tensor | None, ...]
    """What the arguments point at."""

    @property
    def is_padded(self) -> bool:
        return self.num_in != self.num_padded


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """One step: the arguments that are the same in all layers."""

    attention: AttentionArguments
    rope: RopeArguments
    memory: tuple[torch.Tensor, ...]
    """What the arguments point at."""


class CpuOperators:
    """Implements `Operators` on the CPU for bfloat16 and float32."""

    def __init__(self, functions: dict[torch.dtype, Functions], *, instruction_set: str, num_threads: int) -> None:
        """`functions` are those of a library for `instruction_set`, by dtype."""
        if num_threads < 1:
            raise ValueError(f"num_threads: must be at least 1, got {num_threads}")
        self.name = f"cpu-{instruction_set}"
        self._functions = functions
        self._num_threads = num_threads
        self._blocks = TorchOperators()
        self._kept = torch.empty(0)

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedWeight:
        panels, bias = self._panels(weight_OI, gated=False), None
        if bias_O is not None:
            _check("bias_O", bias_O, shape=(len(weight_OI),))
            bias = torch.zeros(-(-len(bias_O) // PANEL) * PANEL)
            bias[: len(bias_O)] = bias_O
        return self._packed(weight_OI, panels, bias, num_out=len(weight_OI), activation=0)

    def pack_gated(self, gate_up_FI: torch.Tensor, bias_F: torch.Tensor | None, activation: Activation) -> PackedWeight:
        num_out = len(gate_up_FI) // 2
        panels, bias = self._panels(gate_up_FI, gated=True), None
        if bias_F is not None:
            _check("bias_F", bias_F, shape=(len(gate_up_FI),))
            half = PANEL // 2
            padded = torch.zeros(2, -(-num_out // half) * half)
            padded[:, :num_out] = bias_F.view(2, num_out)
            bias = padded.view(2, -1, half).transpose(0, 1).flatten()
        return self._packed(gate_up_FI, panels, bias, num_out=num_out, activation=_ACTIVATIONS[activation])

    def linear(self, x_TI: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        out_TO = x_TI.new_empty((len(x_TI), weight.num_out))
        weight.arguments.out, weight.arguments.wide_out = out_TO.data_ptr(), None
        self._multiply(x_TI, weight)
        return out_TO

    def linear_float32(self, x_TI: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        out_TO = torch.empty(len(x_TI), weight.num_out, dtype=torch.float32)
        weight.arguments.wide_out = out_TO.data_ptr()
        self._multiply(x_TI, weight)
        return out_TO

    def _multiply(self, x_TI: torch.Tensor, weight: PackedWeight) -> None:
        num_rows = len(x_TI)
        _check("x_TI", x_TI, shape=(num_rows, weight.num_in), dtype=weight.dtype)
        if weight.is_padded or x_TI.stride(1) != 1:
            x_TI = _padded(x_TI)
        arguments = weight.arguments
        arguments.x, arguments.rows, arguments.x_stride = x_TI.data_ptr(), num_rows, x_TI.stride(0)
        weight.run(weight.address, self._num_threads)

    def gated_linear(self, x_TI: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return self.linear(x_TI, weight)

    def plan(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> CpuPlan:
        del dtype
        table_BM, start, lens_B = (
            tensor.int().contiguous() for tensor in (batch.block_table_BM, batch.query_start_loc, batch.seq_lens_B)
        )
        slots_T = batch.slot_mapping_T.long().contiguous()
        attention = AttentionArguments(
            block_table=table_BM.data_ptr(),
            query_start=start.data_ptr(),
            seq_lens=lens_B.data_ptr(),
            requests=len(lens_B),
            block_size=block_size,
            table_stride=table_BM.shape[1],
        )
        rope = RopeArguments(slots=slots_T.data_ptr(), tokens=len(slots_T), block_size=block_size)
        return CpuPlan(attention, rope, (table_BM, start, lens_B, slots_T))

    def rope_kv_write(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: CpuPlan,
    ) -> torch.Tensor:
        (num_tokens, _, size), dtype = q_THD.shape, q_THD.dtype
        _check("k_TKD", k_TKD, shape=(num_tokens, None, size), dtype=dtype)
        _check("v_TKD", v_TKD, shape=tuple(k_TKD.shape), dtype=dtype)
        for name, angles_TD in (("cos_TD", cos_TD), ("sin_TD", sin_TD)):
            _check(name, angles_TD, shape=(num_tokens, size), dtype=torch.float32, contiguous_from=0)
        self._check_cache(cache_N2PKD, plan, dtype)
        _check("cache_N2PKD", cache_N2PKD, shape=(None, None, None, k_TKD.shape[1], size))
        q_THD, k_TKD, v_TKD = map(_whole_heads, (q_THD, k_TKD, v_TKD))
        arguments = plan.rope
        arguments.q, arguments.k, arguments.v = q_THD.data_ptr(), k_TKD.data_ptr(), v_TKD.data_ptr()
        _, arguments.heads, arguments.size = q_THD.shape
        arguments.kv_heads = k_TKD.shape[1]
        arguments.q_stride, arguments.k_stride, arguments.v_stride = q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0)
        arguments.cos, arguments.sin = cos_TD.data_ptr(), sin_TD.data_ptr()
        arguments.cache, arguments.block_stride = cache_N2PKD.data_ptr(), cache_N2PKD.stride(0)
        self._functions[q_THD.dtype].rope_kv_write(ctypes.addressof(arguments), self._num_threads)
        return q_THD

    def attend(
        self, q_THD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: CpuPlan, kind: AttentionKind
    ) -> torch.Tensor:
        self._check_cache(cache_N2PKD, plan, q_THD.dtype)
        _check("cache_N2PKD", cache_N2PKD, shape=(None, None, None, None, q_THD.shape[2]))
        if q_THD.shape[2] % 2 and q_THD.dtype is torch.bfloat16:
            raise ValueError(f"q_THD: in bfloat16 the size of a head must be even, is {q_THD.shape[2]}")
        if q_THD.shape[1] % cache_N2PKD.shape[3]:
            raise ValueError(f"q_THD: {q_THD.shape[1]} heads are no multiple of {cache_N2PKD.shape[3]} KV heads")
        q_THD = _whole_heads(q_THD)
        out_THD = q_THD.new_empty(q_THD.shape)
        arguments = plan.attention
        arguments.q, arguments.q_stride, arguments.out = q_THD.data_ptr(), q_THD.stride(0), out_THD.data_ptr()
        _, arguments.heads, arguments.size = q_THD.shape
        arguments.kv_heads = cache_N2PKD.shape[3]
        arguments.cache, arguments.block_stride = cache_N2PKD.data_ptr(), cache_N2PKD.stride(0)
        arguments.scale, arguments.soft_cap = kind.scale, kind.soft_cap
        arguments.window, arguments.sinks = kind.window, kind.num_sinks
        self._functions[q_THD.dtype].attend(ctypes.addressof(arguments), self._num_threads)
        return out_THD

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        _check("weight", weight, shape=(size,), dtype=torch.float32, contiguous_from=0)
        self._functions[x.dtype].rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, self._num_threads
        )
        return out

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        x_TE = x_TE.contiguous()
        out_TE = torch.empty_like(x_TE)
        num_rows, size = x_TE.shape
        _check("residual_TE", residual_TE, shape=(num_rows, size), dtype=torch.float32, contiguous_from=0)
        _check("weight_E", weight_E, shape=(size,), dtype=torch.float32, contiguous_from=0)
        self._functions[x_TE.dtype].add_rms_norm(
            x_TE.data_ptr(),
            residual_TE.data_ptr(),
            weight_E.data_ptr(),
            out_TE.data_ptr(),
            num_rows,
            size,
            eps,
            self._num_threads,
        )
        return out_TE

    def attention_block(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weights: AttentionWeights[PackedWeight],
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: CpuPlan,
    ) -> torch.Tensor:
        num_rows, hidden_size = x_TE.shape
        qkv, output, kind = weights.qkv, weights.output, weights.kind
        if qkv.is_padded or output.is_padded:
            return blocks.attention_block(self, x_TE, residual_TE, weights, cos_TD, sin_TD, cache_N2PKD, plan)
        _check_half(x_TE, residual_TE, qkv, output)
        self._check_cache(cache_N2PKD, plan, x_TE.dtype)
        scratch = self._scratch(num_rows * (hidden_size + qkv.num_out + output.num_in), x_TE.dtype)
        attention, rope = plan.attention, plan.rope
        attention.heads, attention.kv_heads, attention.size = weights.num_heads, *cache_N2PKD.shape[3:]
        attention.scale, attention.soft_cap = kind.scale, kind.soft_cap
        attention.window, attention.sinks = kind.window, kind.num_sinks
        attention.cache = rope.cache = cache_N2PKD.data_ptr()
        attention.block_stride = rope.block_stride = cache_N2PKD.stride(0)
        rope.cos, rope.sin = cos_TD.data_ptr(), sin_TD.data_ptr()
        q_norm_D, k_norm_D = weights.q_norm_D, weights.k_norm_D
        block = AttentionBlock(
            x_TE.data_ptr(),
            residual_TE.data_ptr(),
            weights.norm_E.data_ptr(),
            None if q_norm_D is None else q_norm_D.data_ptr(),
            None if k_norm_D is None else k_norm_D.data_ptr(),
            qkv.address,
            output.address,
            ctypes.addressof(rope),
            ctypes.addressof(attention),
            scratch.data_ptr(),
            x_TE.data_ptr(),
            num_rows,
            hidden_size,
            weights.eps,
        )
        self._functions[x_TE.dtype].attention_block(ctypes.addressof(block), self._num_threads)
        return x_TE

    def feed_forward_block(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weights: FeedForwardWeights[PackedWeight]
    ) -> torch.Tensor:
        if weights.gate_up.is_padded or weights.down.is_padded:
            return blocks.feed_forward_block(self, x_TE, residual_TE, weights)
        num_rows, hidden_size = x_TE.shape
        _check_half(x_TE, residual_TE, weights.gate_up, weights.down)
        scratch = self._scratch(num_rows * (hidden_size + weights.gate_up.num_out), x_TE.dtype)
        block = FeedForwardBlock(
            x_TE.data_ptr(),
            residual_TE.data_ptr(),
            weights.norm_E.data_ptr(),
            weights.gate_up.address,
            weights.down.address,
            scratch.data_ptr(),
            x_TE.data_ptr(),
            num_rows,
            hidden_size,
            weights.eps,
        )
        self._functions[x_TE.dtype].feed_forward_block(ctypes.addressof(block), self._num_threads)
        return x_TE

    def sample(self, logits_BV: torch.Tensor, temperature_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        num_rows, vocab_size = logits_BV.shape
        if logits_BV.dtype not in self._functions:
            raise ValueError(f"logits_BV: dtype {logits_BV.dtype} is not supported")
        _check("logits_BV", logits_BV, shape=(num_rows, vocab_size), contiguous_from=0)
        _check("temperature_B", temperature_B, shape=(num_rows,), dtype=torch.float32, contiguous_from=0)
        _check("streams_B", streams_B, shape=(num_rows,), dtype=torch.int64, contiguous_from=0)
        tokens_B = torch.empty(num_rows, dtype=torch.int64)
        pointers = (tensor.data_ptr() for tensor in (logits_BV, temperature_B, streams_B, tokens_B))
        arguments = SamplingArguments(*pointers, num_rows, vocab_size)
        self._functions[logits_BV.dtype].sample(ctypes.addressof(arguments), self._num_threads)
        return tokens_B

    def copy_blocks(self, cache_NL2PKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        self._blocks.copy_blocks(cache_NL2PKD, pairs)

    def gather_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        return self._blocks.gather_blocks(cache_NL2PKD, block_ids)

    def scatter_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int], blocks: torch.Tensor) -> None:
        self._blocks.scatter_blocks(cache_NL2PKD, block_ids, blocks)

    def _scratch(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory until the next call. Kept, since the system takes as long to hand it out as the kernels to fill it."""
        if self._kept.dtype != dtype or self._kept.numel() < size:
            self._kept = torch.empty(size, dtype=dtype)
        return self._kept

    def _panels(self, weight_OI: torch.Tensor, *, gated: bool) -> torch.Tensor:
        if weight_OI.dtype not in self._functions:
            raise ValueError(f"weight: dtype {weight_OI.dtype} is not supported")
        weight_OI = _padded(weight_OI)
        num_columns, depth = weight_OI.shape
        half = PANEL // 2
        num_panels = -(-(num_columns // 2) // half) if gated else -(-num_columns // PANEL)
        panels = weight_OI.new_empty(num_panels * PANEL * depth)
        functions = self._functions[weight_OI.dtype]
        pack = functions.pack_gated if gated else functions.pack
        pack(
            weight_OI.data_ptr(),
            num_columns // 2 if gated else num_columns,
            depth,
            panels.data_ptr(),
            self._num_threads,
        )
        return panels

    def _packed(
        self,
        weight_OI: torch.Tensor,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        num_out: int,
        activation: int,
    ) -> PackedWeight:
        num_in = weight_OI.shape[1]
        num_padded = num_in + num_in % 2
        arguments = LinearArguments(
            depth=num_padded,
            panels=panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            columns=num_out,
            activation=activation,
        )
        dtype = weight_OI.dtype
        run, address = self._functions[dtype].linear, ctypes.addressof(arguments)
        return PackedWeight(dtype, num_in, num_padded, num_out, arguments, address, run, (panels, bias))

    def _check_cache(self, cache_N2PKD: torch.Tensor, plan: CpuPlan, dtype: torch.dtype) -> None:
        _, two, num_tokens, num_heads, size = cache_N2PKD.shape
        row = num_heads * size
        if (  # every layer comes here
            cache_N2PKD.dtype is dtype
            and (two, num_tokens) == (2, plan.attention.block_size)
            and cache_N2PKD.stride()[1:] == (num_tokens * row, row, size, 1)
        ):
            return
        shape = (None, 2, plan.attention.block_size, None, None)
        _check("cache_N2PKD", cache_N2PKD, shape=shape, dtype=dtype, contiguous_from=1)


def _check(
    name: str,
    x: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
    contiguous_from: int | None = None,
) -> None:
    """Raise `ValueError` naming the tensor unless it is of this shape and dtype; None is anything.

    From the dimension `contiguous_from` on it must lie in one run of memory.
    """
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name}: must be {dtype}, is {x.dtype}")
    if len(x.shape) != len(shape) or any(a != b and b is not None for a, b in zip(x.shape, shape, strict=True)):
        raise ValueError(f"{name}: must be of shape {list(shape)}, is {list(x.shape)}")
    if contiguous_from is not None and x.numel() and not x[(0,) * contiguous_from].is_contiguous():
        raise ValueError(f"{name}: must be contiguous from dimension {contiguous_from} on, strides are {x.stride()}")


def _check_half(x_TE: torch.Tensor, residual_TE: torch.Tensor, first: PackedWeight, last: PackedWeight) -> None:
    if (  # every layer comes here
        x_TE.dtype is first.dtype
        and residual_TE.dtype is torch.float32
        and x_TE.shape == residual_TE.shape
        and x_TE.shape[1] == first.num_in == last.num_out
        and first.dtype is last.dtype
        and x_TE.is_contiguous()
        and residual_TE.is_contiguous()
    ):
        return
    shape = (len(x_TE), first.num_in)
    _check("x_TE", x_TE, shape=shape, dtype=first.dtype, contiguous_from=0)
    _check("residual_TE", residual_TE, shape=shape, dtype=torch.float32, contiguous_from=0)
    if (last.dtype, last.num_out) != (first.dtype, first.num_in):
        raise ValueError(f"weights: {last.dtype}, {last.num_out} out do not fit {first.dtype}, {first.num_in} in")


def _padded(x_TI: torch.Tensor) -> torch.Tensor:
    """With an even number of columns, contiguous: bfloat16 is multiplied in pairs."""
    return torch.nn.functional.pad(x_TI, (0, x_TI.shape[1] % 2)).contiguous()


def _whole_heads(x_THD: torch.Tensor) -> torch.Tensor:
    """Each token's heads in one run of memory; the tokens may be apart."""
    return x_THD if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2] else x_THD.contiguous()
