"""What published models need of KV memory, by the figures that are known of them."""

import pytest

from pagoda.worker.errors import ConfigError
from pagoda.worker.kv_arithmetic import AttentionShape, KVFigures

GIB, MIB = 2**30, 2**20
P, STEP = 16, 1024

LLAMA_7B = AttentionShape((0,) * 32, num_heads=32, num_kv_heads=32, head_size=128)
SIZES_OF_64_HEADS = (1, 2, 4, 8, 16, 32, 64)


def llama_70b(num_kv_heads: int) -> AttentionShape:
    """Llama 2; its own has 8."""
    return AttentionShape((0,) * 80, 64, num_kv_heads, 128, tensor_parallel_sizes=SIZES_OF_64_HEADS)


DEEPSEEK_V3 = AttentionShape((0,) * 61, 128, 128, 192, latent_size=512 + 64, tensor_parallel_sizes=(1, 2, 4, 8))
GEMMA_2_2B = AttentionShape((4096, 0) * 13, num_heads=8, num_kv_heads=4, head_size=256)
MISTRAL_7B = AttentionShape((4096,) * 32, num_heads=32, num_kv_heads=8, head_size=128)


def figures(
    shape: AttentionShape, context_len: int = 4096, memory_bytes: int = 80 * GIB, dtype_bytes: int = 2
) -> KVFigures:
    spec = shape.cache_spec(block_size=P, dtype_bytes=dtype_bytes)
    return KVFigures(spec, memory_bytes, context_len, STEP)


def test_llama_7b() -> None:
    """Half a MiB a token in float16; 16 GiB for a context of 32k."""
    found = figures(LLAMA_7B, 32768)
    assert found.spec.token_bytes == found.lasting_token_bytes == 524_288
    assert (found.request_bytes, found.window_bytes) == (16 * GIB, 0)
    assert (found.num_tokens, found.max_request_tokens, found.num_requests) == (163_840, 163_840, 5)
    assert figures(LLAMA_7B, dtype_bytes=4).spec.token_bytes == 2 * 524_288


def test_llama_2_70b() -> None:
    """With a KV head for each query head it would need 2.5 MiB a token, 10.7 GB at 4k; it needs an eighth."""
    mha, gqa = figures(llama_70b(64)), figures(llama_70b(8))
    assert mha.spec.token_bytes == 2.5 * MIB
    assert round(mha.request_bytes / 1e9, 1) == 10.7
    assert (8 * gqa.spec.token_bytes, 8 * gqa.request_bytes) == (mha.spec.token_bytes, mha.request_bytes)
    assert gqa.num_requests == 64


def test_one_kv_head_needs_one_of_as_many_as_there_are_heads() -> None:
    assert 64 * figures(llama_70b(1)).spec.token_bytes == figures(llama_70b(64)).spec.token_bytes


def test_deepseek_v3() -> None:
    """The latent and what RoPE turns, 512 + 64 numbers a token and layer, however many heads."""
    assert figures(DEEPSEEK_V3).spec.token_bytes == 576 * 61 * 2
    assert figures(DEEPSEEK_V3.on_one_of(8)).spec == figures(DEEPSEEK_V3).spec


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(llama_70b(64), "MHA"), (llama_70b(8), "GQA"), (llama_70b(1), "MQA"), (DEEPSEEK_V3, "MLA")],
)
def test_kinds_of_attention(shape: AttentionShape, kind: str) -> None:
    assert shape.kind == kind


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_ranks_split_kv_heads_and_then_copy_them(num_ranks: int, num_kv_heads: int) -> None:
    local = llama_70b(8).on_one_of(num_ranks)
    assert (local.num_heads, local.num_kv_heads) == (64 // num_ranks, num_kv_heads)
    assert figures(local).spec.token_bytes * 8 == figures(llama_70b(8)).spec.token_bytes * num_kv_heads


@pytest.mark.parametrize("num_ranks", [0, -1, 3, 128])
def test_ranks_that_cannot_share_are_refused_with_those_that_can(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size: {num_ranks} ranks .* allows 1, 2, .*, 64$"):
        llama_70b(8).on_one_of(num_ranks)


def test_windows_bound_what_a_long_request_takes() -> None:
    """Gemma 2: half of its layers keep every token, the others a window, a step and what is spare at the edges."""
    found = figures(GEMMA_2_2B, 131_072)
    assert found.spec.token_bytes == 2 * found.lasting_token_bytes == 26 * 2 * 4 * 256 * 2
    blocks = (4096 + STEP) // P + 3
    assert found.window_bytes == blocks * found.spec.block_bytes
    assert found.request_bytes == found.window_bytes + 131_072 * found.lasting_token_bytes
    longest = found.max_request_tokens
    assert longest is not None
    assert longest > found.num_tokens
    assert figures(GEMMA_2_2B, longest).num_requests == 1
    assert figures(GEMMA_2_2B, longest + 1).num_requests == 0


def test_no_request_is_too_long_where_all_layers_have_windows() -> None:
    found = figures(MISTRAL_7B, 10**9)
    assert (found.lasting_token_bytes, found.max_request_tokens) == (0, None)
    assert found.request_bytes == found.window_bytes
    small = figures(MISTRAL_7B, memory_bytes=found.window_bytes - 1)
    assert small.max_request_tokens == small.num_tokens == (small.num_blocks * P)


def test_memory_for_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^memory_bytes: .* hold no block"):
        _ = figures(GEMMA_2_2B, memory_bytes=1).num_requests
