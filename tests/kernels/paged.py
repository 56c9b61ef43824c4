"""What the kernel tests share: backends, tolerances, and requests laid out in a pool of NaN.

Dimensions: T tokens of the batch, B requests, Q query tokens and S context of one request, H query heads, K KV heads,
D head size, N blocks in the pool, L layers, P tokens per block, M block-table columns, E and F features.

All memory that an operator may not read is NaN: slots past a context, blocks of nobody, other layers. Unused entries
of a block table are such a block or -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagoda.kernels.cpu.build import InstructionSet, library, supported_instruction_sets
from pagoda.kernels.cpu.library import load
from pagoda.kernels.cpu.operators import CpuOperators
from pagoda.kernels.interface import AttentionBatch, AttentionKind, Operators
from pagoda.kernels.reference import ReferenceOperators
from pagoda.kernels.torch_ops import TorchOperators

REFERENCE = ReferenceOperators()
EMULATED_AMX = InstructionSet("amx-emulated", ("-march=native", "-DPAGODA_AMX", "-DPAGODA_AMX_EMULATED"), frozenset())
"""The kernels that use matrix tiles, on machines that have none."""
CPU_BACKENDS: list[Operators[Any, Any]] = [
    CpuOperators(load(library(instruction_set)), instruction_set=instruction_set.name, num_threads=2)
    for instruction_set in [EMULATED_AMX, *supported_instruction_sets()]
]
"""The C++ kernels for every instruction set of this machine."""
BACKENDS: list[Operators[Any, Any]] = [TorchOperators(), *CPU_BACKENDS]
"""All that run on this machine. A new one joins here and runs every test of this folder."""

P = 4
NUM_LAYERS, LAYER = 3, 1
"""The pool's layers, and the one that is tested: its view is strided, and the others must stay as they are."""
DTYPES = (torch.float32, torch.bfloat16)
HEADS = ((2, 2, 16), (9, 3, 64), (4, 1, 80), (16, 2, 128))
"""(H, K, D) with G = 1, 3, 4 and 8; D with and without powers of two."""

TOLERANCE = {
    # Some hundred float32 products of size 1 are summed in another order: a few roundings of 6e-8, times their size.
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    # Results are rounded to 8 bits (2**-9 of their size); backends may round probabilities to 8 bits too, each by at
    # most 2**-9, which moves a mean of values of size 4 by at most 4 * 2**-9.
    torch.bfloat16: {"rtol": 2**-7, "atol": 4 * 2**-9},
}

MIXES = {
    "first token": [(0, 1)],
    "decode": [(0, 1), (P - 2, 1), (P - 1, 1), (P, 1), (37, 1), (203, 1)],
    "decode, equal contexts that fill their blocks": [(2 * P - 1, 1)] * 3,
    "decode, long": [(1100, 1)],
    "prefill": [(0, P - 1), (0, P), (0, P + 1), (0, 33)],
    "prefill over a cached prefix": [(1, P), (P - 1, 2), (P, 3), (P + 1, P + 1), (4 * P, 7), (50, 23)],
    "decode and prefill": [(9, 1), (0, 1), (64, 1), (0, 19), (33, 5), (5, 1)],
    "prefill of many tiles": [(0, 300), (67, 530)],
}
"""(tokens of context before this step, query tokens) of each request; those with one query token lead."""


@dataclass(frozen=True, slots=True)
class Context:
    """One request, contiguous: its queries, and keys and values of its whole context, which ends with the queries."""

    q_QHD: torch.Tensor
    kv_S2KD: torch.Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """Requests laid out in a pool."""

    cache_NL2PKD: torch.Tensor
    batch: AttentionBatch

    @property
    def layer_N2PKD(self) -> torch.Tensor:
        return self.cache_NL2PKD[:, LAYER]


def random_contexts(
    mix: Sequence[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Context]:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_size = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        Context(normal(query_len, num_heads, head_size), normal(before + query_len, 2, num_kv_heads, head_size))
        for before, query_len in mix
    ]


def lay_out(contexts: Sequence[Context], *, seed: int = 0) -> Paged:
    """Put contexts into blocks in random order, in a pool that is NaN elsewhere."""
    query_lens = [len(context.q_QHD) for context in contexts]
    seq_lens = [len(context.kv_S2KD) for context in contexts]
    num_blocks = [-(-seq_len // P) for seq_len in seq_lens]
    shape_2KD = contexts[0].kv_S2KD.shape[1:]
    order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    poison = order.pop()
    pool_shape = (len(order) + 1, NUM_LAYERS, 2, P, *shape_2KD[1:])
    cache_NL2PKD = torch.full(pool_shape, float("nan"), dtype=contexts[0].kv_S2KD.dtype)
    block_table_BM = torch.full((len(contexts), max(num_blocks) + 2), poison, dtype=torch.int32)
    block_table_BM[:, ::2] = -1
    slots = []
    for request, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(num_blocks[request])]
        block_table_BM[request, : len(blocks)] = torch.tensor(blocks)
        own = [blocks[position // P] * P + position % P for position in range(seq_lens[request])]
        slots += own[seq_lens[request] - query_lens[request] :]
        for slot, kv_2KD in zip(own, context.kv_S2KD, strict=True):
            cache_NL2PKD[slot // P, LAYER, :, slot % P] = kv_2KD
    num_decodes = next((i for i, query_len in enumerate(query_lens) if query_len != 1), len(query_lens))
    batch = AttentionBatch(
        block_table_BM=block_table_BM,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping_T=torch.tensor(slots),
        num_decodes=num_decodes,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
    )
    return Paged(cache_NL2PKD, batch)


def chunk_of(prompt: AttentionBatch, start: int, end: int) -> AttentionBatch:
    """The step that computes tokens `start:end` of a batch of one request without context."""
    return AttentionBatch(
        block_table_BM=prompt.block_table_BM,
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens_B=torch.tensor([end], dtype=torch.int32),
        slot_mapping_T=prompt.slot_mapping_T[start:end],
        num_decodes=int(end - start == 1),
        query_lens=(end - start,),
        seq_lens=(end,),
    )


def attend(
    ops: Operators[Any, Any], contexts: Sequence[Context], kind: AttentionKind | None = None, *, seed: int = 0
) -> list[torch.Tensor]:
    """Each request's attention output, QHD."""
    paged = lay_out(contexts, seed=seed)
    q_THD = torch.cat([context.q_QHD for context in contexts])
    plan = ops.plan(paged.batch, P, q_THD.dtype)
    out_THD = ops.attend(q_THD, paged.layer_N2PKD, plan, kind or plain_kind(q_THD.shape[-1]))
    assert out_THD.dtype == q_THD.dtype
    return list(out_THD.split(list(paged.batch.query_lens)))


def plain_kind(head_size: int) -> AttentionKind:
    return AttentionKind(scale=head_size**-0.5)


def random_rows(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of size 1, but for the first, of zeros, and the last, of size 10,000."""
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    rows[0] = 0
    rows[-1] *= 1e4
    return rows.to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, equal_nan: bool = False) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype], equal_nan=equal_nan)
