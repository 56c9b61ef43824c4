"""What every backend implements. Backends agree with `reference.py` within a stated tolerance.

Dimensions: T tokens of the flattened batch, B requests, H query heads, K KV heads, G = H/K, D head size, N blocks in
the pool, P tokens per block, M block-table columns, L layers, E hidden size, F feed-forward size, V vocabulary.

The cache of one group is block-first, `cache_NL2PKD`: a block of all layers is one run of bytes. A layer's view
`cache_NL2PKD[:, l]` is strided; every operator takes it as it is. 2 = key, value.
"""

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's ragged batch. Requests that decode (one query token) come first. All tensors on one device."""

    block_table_BM: torch.Tensor
    """int32. Row b lists request b's blocks in order. Entries past its length may be anything; those before it are
    blocks of the cache with numbers in them, also where a window hides them: they weigh nothing there, but are read."""
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


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a layer's queries see, and how scores come about."""

    scale: float
    """Scores are q . k * scale; above 0."""
    window: int = 0
    """Positions a query sees, the last of which is its own; 0 for all before it."""
    num_sinks: int = 0
    """Leading positions that it sees beyond the window. Source: Xiao et al., arXiv:2309.17453."""
    soft_cap: float = 0.0
    """Scores become soft_cap * tanh(score / soft_cap); 0 leaves them. Source: Gemma 2, arXiv:2408.00118, sec. 2."""

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale: must be above 0, got {self.scale}")
        for name in ("window", "num_sinks", "soft_cap"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")


Activation = Literal["silu", "gelu_tanh"]

PlanT = TypeVar("PlanT")
WeightT = TypeVar("WeightT")


@dataclass(frozen=True, slots=True)
class AttentionWeights(Generic[WeightT]):
    """Of a layer's first half. Norms are float32: rounding 1 + w to bfloat16 would cost what w is there for."""

    norm_E: torch.Tensor
    qkv: WeightT
    """E -> (H + 2K) * D: all query heads, then the key heads, then the value heads."""
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    """Of each head before the rotation, where the architecture has them."""
    output: WeightT
    """H * D -> E."""
    num_heads: int
    kind: AttentionKind
    eps: float
    """Of all norms."""


@dataclass(frozen=True, slots=True)
class FeedForwardWeights(Generic[WeightT]):
    """Of a layer's second half."""

    norm_E: torch.Tensor
    gate_up: WeightT
    """From `pack_gated`."""
    down: WeightT
    eps: float


class Operators(Protocol, Generic[PlanT, WeightT]):
    """The operators of a decoder layer, one by one and as the two halves of a layer.

    One thread at a time may call them. Tensor parallelism sums over ranks what the halves return. `PlanT` is what a
    backend prepares once per step for all layers, `WeightT` a weight as it wants to have it.
    """

    name: str

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> WeightT:
        """Prepare the weight of a linear layer, once after loading. The result may or may not share its memory."""
        ...

    def linear(self, x_TI: torch.Tensor, weight: WeightT) -> torch.Tensor:
        """x @ weight.T + bias. Returns TO, in x's dtype."""
        ...

    def linear_float32(self, x_TI: torch.Tensor, weight: WeightT) -> torch.Tensor:
        """As `linear`, but the result is float32, and not rounded to x's dtype before where that costs nothing.

        For logits: at 25, those of bfloat16 lie 0.125 apart, and two tokens closer than that would be equal.
        """
        ...

    def pack_gated(self, gate_up_FI: torch.Tensor, bias_F: torch.Tensor | None, activation: Activation) -> WeightT:
        """Prepare the first weight of a gated feed-forward: the rows of the gate, then those of up."""
        ...

    def gated_linear(self, x_TI: torch.Tensor, weight: WeightT) -> torch.Tensor:
        """activation(x @ gate.T) * (x @ up.T), of a weight from `pack_gated`. Returns TF', F' = F/2, in x's dtype.

        Source: Shazeer, arXiv:2002.05202, eq. 6.
        """
        ...

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

        `q_THD` may be mutated.

        `cos_TD` and `sin_TD` are float32; the rotation pairs dimension i with i + D/2, as Hugging Face checkpoints do.
        Source: Su et al., RoFormer (arXiv:2104.09864), eq. 34.
        """
        ...

    def attend(self, q_THD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: PlanT, kind: AttentionKind) -> torch.Tensor:
        """Causal attention of each request's queries over its blocks; the queries are its last tokens. Returns THD."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, in float32 inside; the weight is float32 too.

        Source: Zhang and Sennrich, arXiv:1910.07467, eq. 4.
        """
        ...

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x (mutated). Returns rms_norm(residual) in x's dtype.

        The residual stream is float32 whatever x is: every layer adds to it, and what bfloat16 would round away there
        flips close calls between tokens.
        """
        ...

    def attention_block(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weights: AttentionWeights[WeightT],
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: PlanT,
    ) -> torch.Tensor:
        """A layer's first half: residual += x (mutated); returns attention over norm(residual), projected.

        The step's keys and values go into the cache (mutated). The result may lie where `x_TE` did.
        """
        ...

    def feed_forward_block(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weights: FeedForwardWeights[WeightT]
    ) -> torch.Tensor:
        """A layer's second half: residual += x (mutated); returns down(gated_linear(norm(residual))).

        The result may lie where `x_TE` did.
        """
        ...

    def sample(self, logits_BV: torch.Tensor, temperature_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        """Draw a token of each row from softmax(logits / temperature). Returns int64, B.

        `temperature_B`: float32; 0 takes the greatest logit, the first if several are. `streams_B`: int64, from
        `random_streams`, whose `exponentials` decide: of exponential clocks with the probabilities as rates, the first
        to ring is each with its probability. Logits of -inf are never drawn; a row must have a finite one.
        """
        ...

    def copy_blocks(self, cache_NL2PKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination). No destination is a source."""
        ...

    def gather_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """Copies of whole blocks, in the order of `block_ids`, contiguous."""
        ...

    def scatter_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int], blocks: torch.Tensor) -> None:
        """Write whole blocks, as `gather_blocks` returned them; the ids are distinct."""
        ...
