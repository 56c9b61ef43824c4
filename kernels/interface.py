"""What every backend implements. Backends agree with `reference.py` within a stated tolerance.

Dimensions: T tokens of the flattened batch, B requests, H query heads, K KV heads, G = H/K, D head size, N blocks in
the pool, P tokens per block, M block-table columns, L layers, E hidden size, F feed-forward size.

The cache of one group is block-first, `cache_NL2PKD`: a block of all layers is one run of bytes. A layer's view
`cache_NL2PKD[:, l]` is strided; every operator takes it as it is. 2 = key, value.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's ragged batch. Requests that decode (one query token) come first. All tensors on one device."""

    block_table_BM: torch.Tensor
    """int32. Row b lists request b's blocks in order. Entries past its length may be anything."""
    query_start_loc: torch.Tensor
    """int32, B+1 entries: request b's tokens are query_start_loc[b] .. query_start_loc[b+1]."""
    seq_lens_B: torch.Tensor
    """int32. Context of each request, this step's tokens included."""
    slot_mapping_T: torch.Tensor
    """int64. Where each token's KV goes, block id * P + offset; -1 writes nothing (it is there already)."""
    num_decodes: int
    """Leading requests with exactly one query token."""
    query_lens: tuple[int, ...]
    """Query tokens of each request, on the host."""
    seq_lens: tuple[int, ...]
    """`seq_lens_B` on the host."""


PlanT = TypeVar("PlanT")


class Operators(Protocol, Generic[PlanT]):
    """The operators of a decoder layer. `PlanT` is what a backend prepares once per step for all layers."""

    name: str

    def plan(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> PlanT:
        """Prepare a step whose queries have type `dtype`."""
        ...

    def rope_kv_write(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: PlanT,
    ) -> torch.Tensor:
        """Rotate queries and keys, write keys and values into the cache (mutated). Returns the rotated queries.

        `cos_TD` and `sin_TD` are float32; the rotation pairs dimension i with i + D/2, as Hugging Face checkpoints do.
        Source: Su et al., RoFormer (arXiv:2104.09864), eq. 34.
        """
        ...

    def attend(self, q_THD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: PlanT, scale: float) -> torch.Tensor:
        """Causal attention of each request's queries over its blocks; the queries are its last tokens. Returns THD."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, in float32 inside. Source: arXiv:1910.07467, eq. 4."""
        ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rms_norm(x + residual) in x's dtype, x + residual).

        The residual stream is float32 whatever x is: every layer adds to it, and what bfloat16 would round away there
        flips close calls between tokens.
        """
        ...

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where the last dimension holds gate then up. Halves the last dimension."""
        ...

    def copy_blocks(self, cache_NL2PKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination). No destination is a source."""
        ...
