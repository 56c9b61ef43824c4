"""Every architecture cut into shards, as many as it allows: together they compute what the whole model does.

The ranks are threads here, which costs nothing; `test_tensor_parallel.py` has them as processes that meet by gloo.
Dimensions: T tokens, V vocabulary.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHECKPOINTS, gemma, gemma2, gemma3_config, llama, make_checkpoint
from transformers import Gemma3ForCausalLM

from pagoda.kernels.interface import AttentionBatch
from pagoda.kernels.torch_ops import TorchOperators
from pagoda.worker.kv_spec import KVCacheSpec, group_layers
from pagoda.worker.models.checkpoint import checkpoint_shards
from pagoda.worker.models.decoder import Decoder
from pagoda.worker.models.families import read_model_config
from pagoda.worker.parallel import TPContext
from pagoda.worker.runner import default_dtype
from pagoda.worker.weights import checkpoint_files, load_weights

P = 4
NUM_TOKENS = 37
TOLERANCE = 1e-4
"""Of logits of size 10 to 30 in float32, summed in another order."""


class Meeting:
    """Where the ranks of one model meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank has brought."""
        self.brought[rank] = value
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        return brought


class ThreadContext(TPContext):
    """A rank that is a thread."""

    __slots__ = ()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.group.exchange(self.rank, x.clone())).sum(0))

    def gather_columns(self, x_BX: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.exchange(self.rank, x_BX), dim=1)


def logits(folder: Path, rank: int, meeting: Meeting, token_ids: torch.Tensor) -> torch.Tensor:
    """One rank's logits of every token, TV; two thirds of them in a first chunk."""
    size = len(meeting.brought)
    config, context = read_model_config(folder), ThreadContext(rank, size, meeting)
    spec = KVCacheSpec(
        group_layers([layer.window for layer in config.layers]),
        P,
        num_kv_heads=config.on_one_of(size).num_kv_heads,
        head_size=config.head_size,
        dtype_bytes=4,
    )
    with default_dtype(torch.float32):
        model = Decoder(config, TorchOperators(), spec.places, context)
    prefixes = config.ignored_prefixes
    load_weights(
        checkpoint_shards(model), checkpoint_files(folder), ignored_prefixes=prefixes, progress=lambda *_: None
    )
    model.prepare()
    num_blocks = -(-NUM_TOKENS // P)
    num_groups = len(spec.groups)
    cache = torch.full(
        (num_groups * num_blocks, spec.layers_per_block, 2, P, spec.num_kv_heads, spec.head_size), float("nan")
    )
    tables = torch.randperm(num_groups * num_blocks, generator=torch.Generator().manual_seed(1)).int()
    parts = []
    for start, end in ((0, 2 * NUM_TOKENS // 3), (2 * NUM_TOKENS // 3, NUM_TOKENS)):
        positions = torch.arange(start, end)
        plans = [
            model.ops.plan(
                AttentionBatch(
                    block_table_BM=table[None],
                    query_start_loc=torch.tensor([0, end - start]).int(),
                    seq_lens_B=torch.tensor([end]).int(),
                    slot_mapping_T=table[positions // P].long() * P + positions % P,
                    num_decodes=0,
                    query_lens=(end - start,),
                    seq_lens=(end,),
                ),
                P,
                torch.float32,
            )
            for table in tables.view(num_groups, num_blocks)
        ]
        parts.append(model.logits(model(token_ids[start:end], positions, cache, plans)))
    return torch.cat(parts)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_shards_are_the_whole(name: str, tmp_path: Path) -> None:
    """Every rank gets the same logits, and they are transformers'."""
    compare(make_checkpoint(name, tmp_path, ending=[5, 6]), tmp_path)


GEMMA_HEADS = {"Gemma 2B": (8, 1), "Gemma 7B": (16, 16)}
GEMMA2_HEADS = {"Gemma 2 2B": (8, 4), "Gemma 2 9B": (16, 8), "Gemma 2 27B": (32, 16)}
GEMMA3_HEADS = {
    "Gemma 3 270M, 1B": (4, 1),
    "Gemma 3 4B": (8, 4),
    "Gemma 3 12B": (16, 8),
    "Gemma 3 27B": (32, 16),
}


@pytest.mark.parametrize("size", [*GEMMA_HEADS, *GEMMA2_HEADS, *GEMMA3_HEADS])
def test_heads_of_every_gemma(size: str, tmp_path: Path) -> None:
    """Each published size has as many query and KV heads; tiny ones here."""
    num_heads, num_kv_heads = (GEMMA_HEADS | GEMMA2_HEADS | GEMMA3_HEADS)[size]
    heads = {
        "hidden_size": 64,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": 96,
    }
    torch.manual_seed(num_heads)
    if size in GEMMA_HEADS:
        model: Any = gemma(**heads)
    else:
        model = gemma2(**heads) if size in GEMMA2_HEADS else Gemma3ForCausalLM(gemma3_config(**heads))
    model.float().eval().save_pretrained(tmp_path)
    compare(model, tmp_path, sizes=(1, 2, num_heads))


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_a_vocabulary_that_does_not_divide(tie_word_embeddings: bool, tmp_path: Path) -> None:
    """The last rank has fewer rows than the others."""
    torch.manual_seed(0)
    model = llama(vocab_size=97, tie_word_embeddings=tie_word_embeddings).float().eval()
    model.save_pretrained(tmp_path)
    compare(model, tmp_path)


def compare(oracle: Any, folder: Path, sizes: tuple[int, ...] | None = None) -> None:
    """With so many ranks, or all numbers that the model allows."""
    config = read_model_config(folder)
    token_ids = torch.randint(4, 90, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = oracle(token_ids[None]).logits[0]
    sizes = sizes or config.tensor_parallel_sizes
    assert len(sizes) > 1
    for size in sizes:
        meeting = Meeting(size)

        def run(rank: int, meeting: Meeting = meeting) -> torch.Tensor:
            try:
                with torch.inference_mode():
                    return logits(folder, rank, meeting, token_ids)
            except Exception:
                meeting.barrier.abort()  # the others need not wait
                raise

        with ThreadPoolExecutor(size) as ranks:
            results = list(ranks.map(run, range(size)))
        for result in results:
            torch.testing.assert_close(result, results[0], rtol=0, atol=0)
        torch.testing.assert_close(results[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("vocab_size", [96, 97, 98, 5])
def test_a_vocabulary_is_split_over_any_number_of_ranks(vocab_size: int) -> None:
    """Every row on one rank, in order; the last ranks may have fewer, or none."""
    for size in (1, 2, 3, 4):
        parts = [TPContext(rank, size).split(vocab_size) for rank in range(size)]
        assert [row for start, end in parts for row in range(start, end)] == list(range(vocab_size))
        assert all(end - start <= -(-vocab_size // size) for start, end in parts)
