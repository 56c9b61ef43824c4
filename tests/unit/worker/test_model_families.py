"""What families differ in: windows, RoPE, soft caps; and how many ranks can share a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from config_reader import REMOVED, Read

from pagoda.kernels.rope import RopeConfig
from pagoda.worker.errors import ConfigError
from pagoda.worker.models.families import read_model_config

GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


@pytest.fixture(name="read")
def read_fixture(tmp_path: Path) -> Read:
    return Read(tmp_path)


WINDOWS = {
    "Mistral, none": ("MistralForCausalLM", {"sliding_window": None}, [0] * 30),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 1024}, [1024] * 30),
    "Mistral, not said": ("MistralForCausalLM", {}, [4096] * 30),
    "Llama has none": ("LlamaForCausalLM", {"sliding_window": 4096}, [0] * 30),
    "Qwen, switched off": ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, [0] * 30),
    "Qwen, off by default": ("Qwen3ForCausalLM", {"sliding_window": 4096, "layer_types": None}, [0] * 30),
    "Qwen, the upper layers": (
        "Qwen2ForCausalLM",
        {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 28},
        [0] * 28 + [512] * 2,
    ),
    "Qwen, by types": (
        "Qwen3ForCausalLM",
        {
            "sliding_window": 512,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 15,
        },
        [512, 0] * 15,
    ),
    "Gemma 2": ("Gemma2ForCausalLM", {"sliding_window": 64}, [64, 0] * 15),
    "Gemma 3": ("Gemma3ForCausalLM", {"sliding_window": 64}, ([64] * 5 + [0]) * 5),
    "Gemma 3, old spelling": (
        "Gemma3ForCausalLM",
        {"sliding_window": 64, "sliding_window_pattern": 3},
        [64, 64, 0] * 10,
    ),
}


@pytest.mark.parametrize(("architecture", "changes", "windows"), WINDOWS.values(), ids=WINDOWS)
def test_windows_of_layers(read: Read, architecture: str, changes: dict[str, Any], windows: list[int]) -> None:
    """They do not limit the context."""
    config = read(architectures=[architecture], hidden_act=REMOVED, rope_parameters=REMOVED, **changes)
    assert [layer.window for layer in config.layers] == windows
    assert config.max_position == 8192


def test_gemma_3_as_its_authors_published_it(read: Read) -> None:
    """What the 4B model's file says of its language model, and what it leaves to defaults."""
    read.write("config.json", json.dumps(GEMMA_3_4B))
    config = read_model_config(read.folder)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.num_layers) == (8, 4, 256, 34)
    assert (config.vocab_size, config.max_position, config.tie_word_embeddings) == (262208, 131072, True)
    assert [layer.window for layer in config.layers] == [0 if (layer + 1) % 6 == 0 else 1024 for layer in range(34)]
    ropes = {bool(layer.window): layer.rope for layer in config.layers}
    assert ropes == {True: RopeConfig(10_000.0), False: RopeConfig(1_000_000.0, "linear", 8.0)}
    assert (config.attention_scale, config.attention_soft_cap, config.logit_soft_cap) == (1 / 16, 0.0, 0.0)
    assert (config.activation, config.norm_offset, config.embedding_scale) == ("gelu_tanh", 1.0, 2560**0.5)
    assert config.qk_norm
    assert config.has_output_norms
    assert config.eos_token_ids == {1, 106}
    assert "10000.0" in config.rope_text
    assert "1000000.0" in config.rope_text


def test_gemma_2_has_soft_caps_unless_its_config_takes_them_away(read: Read) -> None:
    gemma2 = {"architectures": ["Gemma2ForCausalLM"], "hidden_act": REMOVED}
    config = read(**gemma2, query_pre_attn_scalar=144)
    assert (config.attention_scale, config.attention_soft_cap, config.logit_soft_cap) == (1 / 12, 50.0, 30.0)
    config = read(**gemma2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)


@pytest.mark.parametrize("says", [{}, {"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}], ids=str)
def test_the_first_gemma_always_means_the_approximation(read: Read, says: dict[str, str]) -> None:
    """Its early files say `gelu`."""
    config = read(**{"architectures": ["GemmaForCausalLM"], "hidden_act": REMOVED, "head_dim": REMOVED} | says)
    assert (config.activation, config.head_size, config.tie_word_embeddings) == ("gelu_tanh", 256, True)


# -- how many ranks can share it -------------------------------------------------------------------

RANKS = {
    "SmolLM2": ({}, (1, 3)),
    "MHA": ({"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}, (1, 2, 4, 8)),
    "MQA": ({"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64}, (1, 2, 4)),
    "fewer KV heads than ranks": (
        {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
        (1, 2, 4, 8),
    ),
    "odd feed-forward": ({"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 1535}, (1,)),
}


@pytest.mark.parametrize(("changes", "sizes"), RANKS.values(), ids=RANKS)
def test_how_many_ranks_can_share_a_model(read: Read, changes: dict[str, Any], sizes: tuple[int, ...]) -> None:
    if "num_attention_heads" in changes:
        changes = {"num_key_value_heads": changes["num_attention_heads"]} | changes
    assert read(**changes).tensor_parallel_sizes == sizes


def test_a_number_of_ranks_that_cannot_share_is_refused_with_those_that_can(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2 ranks .* 9 query heads .*allows 1, 3$"):
        read().on_one_of(2)
    local = read().on_one_of(3)
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (3, 1, 512)
