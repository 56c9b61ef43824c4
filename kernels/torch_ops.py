"""The operators in batched PyTorch: runs on any device, needs nothing compiled.

Decoding requests are gathered, padded to the longest and attended in one call, with the query heads of a KV head as
its query rows, so that a KV head is read once for its group. Prompts are attended one request and one tile of queries
at a time, over just the context that the tile can see. Dimensions as in `interface.py`.
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
from pagoda.kernels.reference import MIN_TEMPERATURE, rotate

QUERY_TILE = 256
"""Queries attended at once: bounds the mask to tile x context."""


@dataclass(frozen=True, slots=True)
class _PrefillTile:
    """Some consecutive queries of one request: tokens `start:end` of the batch, seeing `seq_len` of context."""

    start: int
    end: int
    seq_len: int
    block_ids_M: torch.Tensor
    mask_QS: torch.Tensor | None
    """Added to the scores; None if one query sees everything."""


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """One step, prepared for all layers."""

    written_T: torch.Tensor | None
    """Indices of the tokens whose KV is written; None if all are."""
    write_block_T: torch.Tensor
    write_offset_T: torch.Tensor
    num_decodes: int
    decode_block_ids: torch.Tensor
    """Flattened, padded block table of the decoding requests."""
    decode_lens_B: torch.Tensor
    decode_shortest: int
    """Positions that every decoding request has."""
    decode_unused_BS: torch.Tensor
    """bool: positions from `decode_shortest` on that a request does not have; their cache may hold anything."""
    decode_mask_B11S: torch.Tensor | None
    """Added to the scores; None if all contexts end with the last block."""
    tiles: tuple[_PrefillTile, ...]


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """A weight as it was loaded."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    activation: Activation | None = None


class TorchOperators:
    """Implements `Operators` for any torch device."""

    name = "torch"

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> TorchWeight:
        return TorchWeight(weight_OI, bias_O)

    def linear(self, x_TI: torch.Tensor, weight: TorchWeight) -> torch.Tensor:
        return F.linear(x_TI, weight.weight_OI, weight.bias_O)

    def linear_float32(self, x_TI: torch.Tensor, weight: TorchWeight) -> torch.Tensor:
        return self.linear(x_TI, weight).float()

    def pack_gated(self, gate_up_FI: torch.Tensor, bias_F: torch.Tensor | None, activation: Activation) -> TorchWeight:
        return TorchWeight(gate_up_FI, bias_F, activation)

    def gated_linear(self, x_TI: torch.Tensor, weight: TorchWeight) -> torch.Tensor:
        gate_TF, up_TF = self.linear(x_TI, weight).chunk(2, dim=-1)
        return (F.silu(gate_TF) if weight.activation == "silu" else F.gelu(gate_TF, approximate="tanh")) * up_TF

    def plan(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> TorchPlan:
        slots = batch.slot_mapping_T
        written = None
        if bool((slots < 0).any()):
            written = (slots >= 0).nonzero().flatten()
            slots = slots[written]
        num_decodes = batch.num_decodes
        longest = max(batch.seq_lens[:num_decodes], default=0)
        shortest = min(batch.seq_lens[:num_decodes], default=0)
        num_columns = -(-longest // block_size)
        padded = num_columns * block_size
        lens_B1 = batch.seq_lens_B[:num_decodes, None]
        columns = torch.arange(num_columns, device=slots.device)
        # Entries past a request's length may be anything, so they are replaced by a block that it does have.
        table = batch.block_table_BM[:num_decodes, :num_columns]
        table = torch.where(columns * block_size < lens_B1, table, table[:, :1])
        unused_BS = torch.arange(shortest, padded, device=slots.device) >= lens_B1
        mask = None
        if padded > shortest:
            mask = torch.zeros(num_decodes, 1, 1, padded, dtype=dtype, device=slots.device)
            mask[:, 0, 0, shortest:].masked_fill_(unused_BS, float("-inf"))
        return TorchPlan(
            written_T=written,
            write_block_T=slots // block_size,
            write_offset_T=slots % block_size,
            num_decodes=num_decodes,
            decode_block_ids=table.flatten().long(),
            decode_lens_B=batch.seq_lens_B[:num_decodes],
            decode_shortest=shortest,
            decode_unused_BS=unused_BS,
            decode_mask_B11S=mask,
            tiles=tuple(_prefill_tiles(batch, block_size, dtype)),
        )

    def rope_kv_write(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: TorchPlan,
    ) -> torch.Tensor:
        k_TKD = rotate(k_TKD, cos_TD, sin_TD)
        if plan.written_T is not None:
            k_TKD, v_TKD = k_TKD[plan.written_T], v_TKD[plan.written_T]
        cache_N2PKD[:, 0][plan.write_block_T, plan.write_offset_T] = k_TKD
        cache_N2PKD[:, 1][plan.write_block_T, plan.write_offset_T] = v_TKD
        return rotate(q_THD, cos_TD, sin_TD)

    def attend(
        self, q_THD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: TorchPlan, kind: AttentionKind
    ) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        if plan.num_decodes:
            out_THD[: plan.num_decodes] = _decode(q_THD[: plan.num_decodes], cache_N2PKD, plan, kind)
        for tile in plan.tiles:
            out_THD[tile.start : tile.end] = _prefill(q_THD[tile.start : tile.end], cache_N2PKD, tile, kind)
        return out_THD

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual_TE += x_TE
        return self.rms_norm(residual_TE, weight_E, eps).to(x_TE.dtype)

    def attention_block(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        weights: AttentionWeights[TorchWeight],
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        cache_N2PKD: torch.Tensor,
        plan: TorchPlan,
    ) -> torch.Tensor:
        return attention_block(self, x_TE, residual_TE, weights, cos_TD, sin_TD, cache_N2PKD, plan)

    def feed_forward_block(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weights: FeedForwardWeights[TorchWeight]
    ) -> torch.Tensor:
        return feed_forward_block(self, x_TE, residual_TE, weights)

    def sample(self, logits_BV: torch.Tensor, temperature_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BV.float()
        if not bool((temperature_B > 0).any()):
            return _argmax(logits_BV)
        divisor_B1 = temperature_B.clamp(min=MIN_TEMPERATURE)[:, None]
        scores_BV = (logits_BV / divisor_B1).softmax(-1).div_(exponentials(streams_B, logits_BV.shape[1]))
        return _argmax(torch.where(temperature_B[:, None] > 0, scores_BV, logits_BV))

    def copy_blocks(self, cache_NL2PKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            sources, destinations = torch.tensor(pairs, device=cache_NL2PKD.device).unbind(1)
            cache_NL2PKD[destinations] = cache_NL2PKD[sources]

    def gather_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        return cache_NL2PKD[torch.tensor(block_ids, dtype=torch.long, device=cache_NL2PKD.device)]

    def scatter_blocks(self, cache_NL2PKD: torch.Tensor, block_ids: list[int], blocks: torch.Tensor) -> None:
        cache_NL2PKD[torch.tensor(block_ids, dtype=torch.long, device=cache_NL2PKD.device)] = blocks


def _argmax(x_BV: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest number, the first if several are."""
    if x_BV.device.type == "cpu":  # where numpy's is a hundred times as fast as torch's
        return torch.from_numpy(x_BV.numpy().argmax(-1))
    return x_BV.argmax(-1)


def _prefill_tiles(batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> list[_PrefillTile]:
    tiles = []
    request_start = sum(batch.query_lens[: batch.num_decodes])
    for request in range(batch.num_decodes, len(batch.seq_lens)):
        query_len, seq_len = batch.query_lens[request], batch.seq_lens[request]
        for first in range(0, query_len, QUERY_TILE):
            last = min(first + QUERY_TILE, query_len)
            visible = seq_len - (query_len - last)
            mask = None
            if last - first > 1:
                mask = torch.full((last - first, visible), float("-inf"), dtype=dtype, device=batch.seq_lens_B.device)
                mask.triu_(visible - (last - first) + 1)
            tiles.append(
                _PrefillTile(
                    start=request_start + first,
                    end=request_start + last,
                    seq_len=visible,
                    block_ids_M=batch.block_table_BM[request, : -(-visible // block_size)].long(),
                    mask_QS=mask,
                )
            )
        request_start += query_len
    return tiles


def _decode(q_BHD: torch.Tensor, cache_N2PKD: torch.Tensor, plan: TorchPlan, kind: AttentionKind) -> torch.Tensor:
    num_heads, head_size = q_BHD.shape[1:]
    num_kv_heads = cache_N2PKD.shape[3]
    kv = []
    for part in (0, 1):
        gathered = cache_N2PKD[:, part].flatten(1).index_select(0, plan.decode_block_ids)
        x_BSKD = gathered.view(plan.num_decodes, -1, num_kv_heads, head_size)
        # Unused slots may hold NaN, which a zero weight does not cancel.
        x_BSKD[:, plan.decode_shortest :].masked_fill_(plan.decode_unused_BS[:, :, None, None], 0)
        kv.append(x_BSKD.transpose(1, 2))
    mask = plan.decode_mask_B11S
    if kind.window:
        own_B1 = plan.decode_lens_B[:, None] - 1
        hidden_BS = _is_outside_window(own_B1, torch.arange(kv[0].shape[2], device=own_B1.device), kind)
        mask = _masked(mask, hidden_BS[:, None, None], q_BHD.dtype)
    q_BKGD = q_BHD.view(plan.num_decodes, num_kv_heads, num_heads // num_kv_heads, head_size)
    return _attention(q_BKGD, kv[0], kv[1], mask, kind).reshape(plan.num_decodes, num_heads, head_size)


def _prefill(q_QHD: torch.Tensor, cache_N2PKD: torch.Tensor, tile: _PrefillTile, kind: AttentionKind) -> torch.Tensor:
    k_1KSD, v_1KSD = (
        cache_N2PKD[:, part][tile.block_ids_M].flatten(0, 1)[: tile.seq_len].transpose(0, 1)[None] for part in (0, 1)
    )
    mask = tile.mask_QS
    if kind.window:
        positions_S = torch.arange(tile.seq_len, device=q_QHD.device)
        hidden_QS = _is_outside_window(positions_S[tile.seq_len - len(q_QHD) :, None], positions_S, kind)
        mask = _masked(mask, hidden_QS, q_QHD.dtype)
    return _attention(q_QHD.transpose(0, 1)[None], k_1KSD, v_1KSD, mask, kind)[0].transpose(0, 1)


def _is_outside_window(own: torch.Tensor, positions: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    return (positions <= own - kind.window) & (positions >= kind.num_sinks)


def _masked(mask: torch.Tensor | None, is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(is_hidden, float("-inf"))
    return hidden if mask is None else hidden + mask


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, kind: AttentionKind
) -> torch.Tensor:
    """Of [.., heads, rows, D] over [.., KV heads, S, D]."""
    num_kv_heads = k.shape[1]
    if not kind.soft_cap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=kind.scale, enable_gqa=q.shape[1] != num_kv_heads
        )
    k, v = (x.repeat_interleave(q.shape[1] // num_kv_heads, dim=1) for x in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * (kind.scale / kind.soft_cap)
    scores = scores.tanh() * kind.soft_cap
    if mask is not None:
        scores += mask
    return scores.softmax(-1).to(v.dtype) @ v
