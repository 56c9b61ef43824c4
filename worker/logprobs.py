"""Log probabilities of tokens that were sampled or given, as the model's own logits tell them.

Dimensions: T tokens, E hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from pagoda.worker.types import TokenLogprobs

SLICE_ELEMENTS = 2**24
"""Logits that exist at once while a prompt's log probabilities are computed: 64 MiB in float32, and a few copies."""


def token_logprobs(logits_TV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """What `logits_TV` say of `token_ids` and of as many most probable tokens as `num_top` asks for in each row."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    chosen_T1 = logprobs_TV.gather(-1, torch.tensor(token_ids, device=logits_TV.device)[:, None])
    ranks = ((logprobs_TV > chosen_T1).sum(-1) + 1).tolist()
    top = logprobs_TV.topk(min(max(num_top), logits_TV.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, ids, values, num in zip(
            token_ids,
            chosen_T1[:, 0].tolist(),
            ranks,
            top.indices.tolist(),
            top.values.tolist(),
            num_top,
            strict=True,
        )
    ]


def prompt_logprobs(
    hidden_TE: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int,
    *,
    logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> Iterator[TokenLogprobs]:
    """What the hidden states say of the tokens that follow them, in slices that bound the memory for `logits`."""
    size = max(1, SLICE_ELEMENTS // vocab_size)
    for begin in range(0, len(token_ids), size):
        end = min(begin + size, len(token_ids))
        yield from token_logprobs(logits(hidden_TE[begin:end]), token_ids[begin:end], [num_top] * (end - begin))
