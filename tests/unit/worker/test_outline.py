"""Models in a few numbers: those that are served, and those of which only the KV can be reckoned."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.worker.errors import ModelError
from pagoda.worker.kv_arithmetic import AttentionShape
from pagoda.worker.models.families import read_model_config
from pagoda.worker.models.outline import ModelOutline, read_outline

GEMMA_2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 512}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "rope_scaling": {"factor": 40, "type": "yarn"},
    "torch_dtype": "bfloat16",
}


def outline(folder: Path, raw: dict[str, Any]) -> ModelOutline:
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return read_outline(folder)


def test_a_model_that_is_served(tmp_path: Path) -> None:
    """As the engine reads it."""
    assert outline(tmp_path, GEMMA_2) == ModelOutline(
        "Gemma2ForCausalLM",
        is_supported=True,
        hidden_size=2304,
        max_position=8192,
        dtype="bfloat16",
        attention=AttentionShape((512, 0, 512, 0), 8, 4, 256, tensor_parallel_sizes=(1, 2, 4, 8)),
    )
    assert read_model_config(tmp_path).tensor_parallel_sizes == (1, 2, 4, 8)


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    """Neither its quantised weights nor its RoPE change how much KV it needs."""
    found = outline(tmp_path, DEEPSEEK_V3)
    assert (found.is_supported, found.attention.kind, found.attention.latent_size) == (False, "MLA", 576)
    assert (len(found.attention.windows), found.attention.tensor_parallel_sizes[-1]) == (61, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: GPT2LMHeadModel is not known; .*Llama.*DeepseekV3"),
        ({"architectures": None}, r"architectures: \(none\) is not known"),
        ({"architectures": "LlamaForCausalLM"}, r"architectures: must be a list, got 'LlamaForCausalLM'"),
        ({"kv_lora_rank": None}, r"kv_lora_rank: must be a positive integer, got None"),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers: must be at most 10000, got 1000000000000"),
    ],
)
def test_what_cannot_be_reckoned_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json: " + message):
        outline(tmp_path, DEEPSEEK_V3 | changes)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: key 'qk_rope_head_dim' is missing"):
        outline(tmp_path, {key: value for key, value in DEEPSEEK_V3.items() if key != "qk_rope_head_dim"})
