"""What a `config.json` means, in every spelling, and how it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.kernels.rope import RopeConfig
from pagoda.worker.errors import ConfigError, ModelError
from pagoda.worker.models.config import LayerConfig, ModelConfig
from pagoda.worker.models.families import read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
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
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
REMOVED = object()
"""In place of a value: the key is not there."""


@pytest.fixture(name="read")
def read_fixture(tmp_path: Path) -> "Read":
    return Read(tmp_path)


class Read:
    """Writes a folder and reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
        """`LLAMA` with changes, and `generation_config.json` if there is one."""
        raw = {key: value for key, value in (LLAMA | changes).items() if value is not REMOVED}
        self.write("config.json", json.dumps(raw))
        if generation is not None:
            self.write("generation_config.json", json.dumps(generation))
        return read_model_config(self.folder)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")


# -- what is read ----------------------------------------------------------------------------------


def test_llama(read: Read) -> None:
    """SmolLM2-135M's own file."""
    assert read() == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        vocab_size=49152,
        max_position=8192,
        rms_norm_eps=1e-5,
        layers=(LayerConfig(0, RopeConfig(theta=100000.0)),) * 30,
        dtype="bfloat16",
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=frozenset({2}),
        attention_scale=0.125,
    )


def test_what_may_be_left_out(read: Read) -> None:
    """transformers' defaults: as many KV heads as heads, head size from the hidden size, rope base 10,000."""
    optional = ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "eos_token_id")
    config = read(num_attention_heads=12, **dict.fromkeys(optional, REMOVED))
    assert (config.num_kv_heads, config.head_size) == (12, 48)
    assert {layer.rope for layer in config.layers} == {RopeConfig(theta=10000.0)}
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.eos_token_ids) == (1e-6, False, frozenset())


def test_head_size_may_differ_from_hidden_size_over_heads(read: Read) -> None:
    assert read(head_dim=128).head_size == 128
    assert read(head_dim=None).head_size == 64


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, True, False),
        ("MistralForCausalLM", True, True, True, False),
        ("Qwen2ForCausalLM", True, False, False, False),
        ("Qwen3ForCausalLM", True, True, False, True),
    ],
)
def test_biases_and_norms_of_each_architecture(
    read: Read, architecture: str, qkv_bias: bool, output_bias: bool, mlp_bias: bool, qk_norm: bool
) -> None:
    """With every bias asked for: Qwen2 has its own rule, and Qwen has none in its feed-forward."""
    config = read(architectures=[architecture], attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (
        qkv_bias,
        output_bias,
        mlp_bias,
        qk_norm,
    )


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_no_biases_by_default(read: Read, architecture: str) -> None:
    config = read(architectures=[architecture])
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


ROPE_SPELLINGS = {
    "new default": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
    "old default": ({"rope_theta": 5e5}, RopeConfig(5e5)),
    "old default, scaling null": ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
    "new linear": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        RopeConfig(5e5, "linear", 4.0),
    ),
    "old linear": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        RopeConfig(5e5, "linear", 4.0),
    ),
    "new llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_SCALING}, LLAMA3_ROPE),
    "old llama3": ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_SCALING}, LLAMA3_ROPE),
}


@pytest.mark.parametrize(("changes", "rope"), ROPE_SPELLINGS.values(), ids=ROPE_SPELLINGS)
def test_both_spellings_of_rope(read: Read, changes: dict[str, Any], rope: RopeConfig) -> None:
    """`rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` of those before."""
    assert {layer.rope for layer in read(**({"rope_parameters": REMOVED} | changes)).layers} == {rope}


def test_both_spellings_of_dtype(read: Read) -> None:
    assert read(dtype="float32").dtype == "float32"
    assert read(dtype=REMOVED, torch_dtype="float16").dtype == "float16"
    assert read(dtype=REMOVED).dtype == "bfloat16"


def test_ends_of_sequence_are_those_of_model_and_generation_config(read: Read) -> None:
    """Scenario: a chat model ends its turns with a token that only `generation_config.json` names."""
    assert read(eos_token_id=[2, 5]).eos_token_ids == {2, 5}
    assert read(generation={"eos_token_id": 7}).eos_token_ids == {2, 7}
    assert read(generation={"eos_token_id": [8, 9]}, eos_token_id=None).eos_token_ids == {8, 9}


def test_an_end_of_sequence_beyond_the_vocabulary_is_dropped(read: Read) -> None:
    """Scenario: it is never sampled, but `min_tokens` would ban it by its index: fail every step, or ban another."""
    assert read(eos_token_id=[2, 49152, -1]).eos_token_ids == {2}


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


# -- what is refused -------------------------------------------------------------------------------


def llama3(**changes: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_SCALING | changes}


REFUSED = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: GPT2LMHeadModel .*LlamaForCausalLM"),
    "no architecture": ({"architectures": REMOVED}, r"architectures: \(none\)"),
    "null architectures": ({"architectures": None}, r"architectures: \(none\)"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config: "),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act: gelu .*silu"),
    "heads": ({"num_key_value_heads": 2}, r"num_attention_heads: 9 .* num_key_value_heads, 2"),
    "partial rope": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: "),
    "partial rope, new": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        r"partial_rotary_factor: ",
    ),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type: yarn .*llama3"),
    "old rope type": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, r"rope_type: dynamic"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear"}}, r"'factor' is missing"),
    "rope factor below 1": ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, r"factor: .* at least 1"),
    "llama3 factor below 1": (llama3(factor=0.5), r"factor: .* at least 1"),
    "llama3 with equal factors": (llama3(low_freq_factor=4), r"low_freq_factor: .* high_freq_factor, 4\.0, got 4\.0"),
    "llama3 with factors the wrong way round": (llama3(high_freq_factor=0.5), r"low_freq_factor: .*, 0\.5, got 1\.0"),
    "llama3 of no length": (llama3(original_max_position_embeddings=0), r"original_max_position_embeddings: .*got 0"),
    "window of no length": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
        r"sliding_window: must be a positive integer, got 0",
    ),
    "Gemma without a window's length": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_act": REMOVED, "sliding_window": None},
        r"sliding_window: must be a positive integer",
    ),
    "Gemma that sees the future": (
        {"architectures": ["Gemma3ForCausalLM"], "hidden_act": REMOVED, "use_bidirectional_attention": True},
        r"use_bidirectional_attention: true is not supported",
    ),
    "too few layer types": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_act": REMOVED, "layer_types": ["full_attention"]},
        r"layer_types: must be a list of num_hidden_layers, 30",
    ),
    "unknown layer type": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_act": REMOVED, "layer_types": ["linear_attention"] * 30},
        r"layer_types: 'linear_attention' is not supported; supported: full_attention, sliding_attention",
    ),
    "layers before windows": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -1},
        r"max_window_layers: must be a non-negative integer, got -1",
    ),
    "no positions": ({"max_position_embeddings": 0}, r"max_position_embeddings: must be a positive integer, got 0"),
    "rope as a word": ({"rope_parameters": "linear"}, r"rope_parameters: must be an object"),
    "llama3 without its factors": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        r"'low_freq_factor' is missing",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_models_are_refused(read: Read, changes: dict[str, Any], message: str) -> None:
    """With the file, the key, the value and what would be supported."""
    with pytest.raises(ModelError, match=r"config\.json: .*" + message):
        read(**changes)


NO_POSITIVE_NUMBERS = [0, 0.0, -1.0, float("nan"), float("inf"), float("-inf"), 10**400, "1e-5", True, [1.0]]


@pytest.mark.parametrize("value", NO_POSITIVE_NUMBERS, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (lambda value: {"rms_norm_eps": value}, "rms_norm_eps"),
        (lambda value: {"rope_parameters": {"rope_theta": value}}, "rope_theta"),
        (lambda value: {"rope_parameters": None, "rope_theta": value}, "rope_theta"),
        (lambda value: {"rope_parameters": {"rope_type": "linear", "factor": value}}, "factor"),
        (lambda value: {"partial_rotary_factor": value}, "partial_rotary_factor"),
        (lambda value: llama3(factor=value), "factor"),
        (lambda value: llama3(low_freq_factor=value), "low_freq_factor"),
        (lambda value: llama3(high_freq_factor=value), "high_freq_factor"),
    ],
)
def test_a_factor_that_is_no_positive_number_is_named(
    read: Read, changes: Callable[[object], dict[str, Any]], key: str, value: object
) -> None:
    """Scenario: with NaN as epsilon the model loads, and every logit it computes is NaN."""
    with pytest.raises(ModelError, match=rf"config\.json: {key}: must be a positive number, got "):
        read(**changes(value))


@pytest.mark.parametrize("value", ["false", 0, 1, [], {}])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_a_flag_that_is_neither_true_nor_false_is_named(read: Read, key: str, value: object) -> None:
    """The text "false" is true to Python, and would tie what is not tied."""
    with pytest.raises(ModelError, match=f"{key}: must be true or false, got "):
        read(**{key: value})


@pytest.mark.parametrize("value", ["2", True, 2.0, [2, "</s>"], [[2]], {"id": 2}], ids=str)
def test_an_end_of_sequence_that_is_no_token_id_is_named(read: Read, value: object) -> None:
    """Scenario: a string never equals a sampled token, so no answer would end; true would end them at token 1."""
    message = r"eos_token_id: must be a token id or a list of them"
    with pytest.raises(ModelError, match=r"/config\.json: " + message):
        read(eos_token_id=value)
    with pytest.raises(ModelError, match=r"/generation_config\.json: " + message):
        read(generation={"eos_token_id": value})


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_key_is_named(read: Read, key: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: key '{key}' is missing"):
        read(**{key: REMOVED})


@pytest.mark.parametrize("value", [None, "many", 0, -3, 1.5, True, [9]], ids=str)
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_none_is_named(read: Read, key: str, value: object) -> None:
    """Scenario: a hand-edited file; nobody finds the key from a bare `int() argument must be a string`."""
    with pytest.raises(ModelError, match=rf"config\.json: {key}: must be a positive integer"):
        read(**{key: value})


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist: not a Hugging Face model folder"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\udcff"])
def test_a_config_that_is_not_json(read: Read, text: str) -> None:
    (read.folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_model_config(read.folder)


def test_a_config_that_is_no_object(read: Read) -> None:
    read.write("config.json", "[]")
    with pytest.raises(ModelError, match=r"config\.json does not hold a JSON object"):
        read_model_config(read.folder)


def test_a_broken_generation_config_is_named(read: Read) -> None:
    read.write("generation_config.json", "{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        read()
