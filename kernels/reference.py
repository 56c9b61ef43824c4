"""Every operator in plain float32 PyTorch: the specification that all backends are tested against.

Dimensions as in `interface.py`. Written to be read, one request and one token at a time where that is clearer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagoda.kernels.blocks import attention_block, feed_forward_block
from pagoda.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionKind,
    AttentionWeights,
    FeedForwardWeights,
)
from pagoda.kernels.random_numbers import exponentials

MIN_TEMPERATURE = 1e-5
"""Below it logits are divided by it: smaller ones would leave float32's range, and the greatest wins all the same."""


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A weight in float32."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    activation: Activation | None = None


class ReferenceOperators:
    """Implements `Operators`; its plan is the batch itself."""

    name = "reference"

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> ReferenceWeight:
        return ReferenceWeight(weight_OI.float(), None if bias_O is None else bias_O.float())

    def linear(self, x_TI: torch.Tensor, weight: ReferenceWeight) -> torch.Tensor:
        return F.linear(x_TI.float(), weight.weight_OI, weight.bias_O).to(x_TI.dtype)

    def linear_float32(self, x_TI: torch.Tensor, weight: ReferenceWeight) -> torch.Tensor:
        return F.linear(x_TI.float(), weight.weight_OI, weight.bias_O)

    def pack_gated(
        self, gate_up_FI: torch.Tensor, bias_F: torch.Tensor | None, activation: Activation
    ) -> ReferenceWeight:
        return ReferenceWeight(gate_up_FI.float(), None if bias_F is None else bias_F.float(), activation)

    def gated_linear(self, x_TI: torch.Tensor, weight: ReferenceWeight) -> torch.Tensor:
        gate_TF, up_TF = F.linear(x_TI.float(), weight.weight_OI, weight.bias_O).chunk(2, dim=-1)
        activated_TF = gate_TF * torch.sigmoid(gate_TF) if weight.activation == "silu" else gelu_tanh(gate_TF)
        return (activated_TF * up_TF).to(x_TI.dtype)

    def plan(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> AttentionBatch:  # noqa: ARG002
        return batch

    def rope_kv_write(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: AttentionBatch,
    ) -> torch.Tensor:
        k_rotated = rotate(k_TKD, cos_TD, sin_TD)
        block_size = cache_N2PKD.shape[2]
        for token, slot in enumerate(plan.slot_mapping_T.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, block_size)
                cache_N2PKD[block, 0, offset] = k_rotated[token]
                cache_N2PKD[block, 1, offset] = v_TKD[token]
        return rotate(q_THD, cos_TD, sin_TD)

    def attend(
        self, q_THD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: AttentionBatch, kind: AttentionKind
    ) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        group_size = q_THD.shape[1] // cache_N2PKD.shape[3]
        starts = plan.query_start_loc.tolist()
        for request, seq_len in enumerate(plan.seq_lens):
            start, end = starts[request], starts[request + 1]
            k_SHD, v_SHD = (
                gather_context(cache_N2PKD[:, part], plan.block_table_BM[request], seq_len)
                .float()
                .repeat_interleave(group_size, dim=1)
                for part in (0, 1)
            )
            for token in range(start, end):
                seen_S = seen_positions(seq_len - (end - token), kind)
                out_HD, _ = attention_state(q_THD[token].float(), k_SHD[seen_S], v_SHD[seen_S], kind)
                out_THD[token] = out_HD.to(out_THD.dtype)
        return out_THD

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (normed * weight).to(x.dtype)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual_TE += x_TE.float()
        return self.rms_norm(residual_TE, weight_E, eps).to(x_TE.dtype)

    def attention_block(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weights: AttentionWeights[ReferenceWeight],
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: AttentionBatch,
    ) -> torch.Tensor:
        return attention_block(self, x_TE, residual_TE, weights, cos_TD, sin_TD, cache_N2PKD, plan)

    def feed_forward_block(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weights: FeedForwardWeights[ReferenceWeight]
    ) -> torch.Tensor:
        return feed_forward_block(self, x_TE, residual_TE, weights)

    def sample(self, logits_BV: torch.Tensor, temperature_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        tokens = []
        clocks_BV = exponentials(streams_B, logits_BV.shape[1])
        for logits_V, temperature, clocks_V in zip(logits_BV.float(), temperature_B.tolist(), clocks_BV, strict=True):
            probs_V = (logits_V / max(temperature, MIN_TEMPERATURE)).softmax(-1)
            tokens.append(int((probs_V / clocks_V if temperature > 0 else logits_V).argmax()))
        return torch.tensor(tokens)

    def copy_blocks(self, cache_NL2PKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            cache_NL2PKD[destination] = cache_NL2PKD[source]

    def gather_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        blocks = torch.empty(len(block_ids), *cache_NL2PKD.shape[1:], dtype=cache_NL2PKD.dtype)
        for index, block_id in enumerate(block_ids):
            blocks[index] = cache_NL2PKD[block_id]
        return blocks

    def scatter_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int], blocks: torch.Tensor) -> None:
        for index, block_id in enumerate(block_ids):
            cache_NL2PKD[block_id] = blocks[index]


def seen_positions(own: int, kind: AttentionKind) -> torch.Tensor:
    """The positions that the query at position `own` sees, ascending."""
    seen = torch.arange(own + 1)
    if not kind.window:
        return seen
    return seen[(seen > own - kind.window) | (seen < kind.num_sinks)]


def attention_state(
    q_HD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor, kind: AttentionKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query's attention over some positions, HD, and the log of its softmax's denominator, H."""
    scores_HS = torch.einsum("hd,shd->hs", q_HD, k_SHD) * kind.scale
    if kind.soft_cap:
        scores_HS = kind.soft_cap * torch.tanh(scores_HS / kind.soft_cap)
    return torch.einsum("hs,shd->hd", scores_HS.softmax(-1), v_SHD), scores_HS.logsumexp(-1)


def merge_states(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of attention over the union of two disjoint sets of positions, from the state over each.

    A state over no position at all has lse -inf, and its output may be anything. Source: arXiv:2205.14135, sec. 3.1.
    """
    lse = torch.logaddexp(a[1], b[1])
    merged = sum(
        torch.where(part[..., None] == float("-inf"), 0.0, out * (part - lse).exp()[..., None]) for out, part in (a, b)
    )
    assert isinstance(merged, torch.Tensor)
    return merged, lse


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Source: arXiv:1606.08415, sec. 2, the approximation by tanh."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def rotate(x_TXD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of each head, in float32 inside; X is any number of heads."""
    x32 = x_TXD.float()
    first, second = x32.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x32 * cos_TD[:, None] + turned * sin_TD[:, None]).to(x_TXD.dtype)


def gather_context(cache_NPKD: torch.Tensor, block_table_M: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first `seq_len` keys or values of one request, as SKD."""
    num_blocks = -(-seq_len // cache_NPKD.shape[1])
    return cache_NPKD[block_table_M[:num_blocks].long()].flatten(0, 1)[:seq_len]
