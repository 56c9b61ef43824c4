"""Every operator in plain float32 PyTorch: the specification that all backends are tested against.

Dimensions as in `interface.py`. Written to be read, one request and one token at a time where that is clearer.
"""

import torch

from pagoda.kernels.interface import AttentionBatch


class ReferenceOperators:
    """Implements `Operators`; its plan is the batch itself."""

    name = "reference"

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
        self, q_THD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: AttentionBatch, scale: float
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
                visible = seq_len - (end - 1 - token)
                scores_HS = torch.einsum("hd,shd->hs", q_THD[token].float(), k_SHD[:visible]) * scale
                out_HD = torch.einsum("hs,shd->hd", scores_HS.softmax(-1), v_SHD[:visible])
                out_THD[token] = out_HD.to(out_THD.dtype)
        return out_THD

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_TE = x_TE.float() + residual_TE
        return self.rms_norm(total_TE, weight_E.float(), eps).to(x_TE.dtype), total_TE

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TF.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up_TF.dtype)

    def copy_blocks(self, cache_NL2PKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            cache_NL2PKD[destination] = cache_NL2PKD[source]


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
