"""What a `config.json` means, in every spelling, and how it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_reader import LLAMA, REMOVED, Read

from pagoda.kernels.rope import RopeConfig
from pagoda.worker.errors import ModelError
from pagoda.worker.models.config import LayerConfig, ModelConfig
from pagoda.worker.models.families import FAMILIES, read_model_config

LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)


@pytest.fixture(name="read")
def read_fixture(tmp_path: Path) -> Read:
    return Read(tmp_path)


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


# -- what is refused -------------------------------------------------------------------------------


def llama3(**changes: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_SCALING | changes}


REFUSED = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: GPT2LMHeadModel .*LlamaForCausalLM"),
    "no architecture": ({"architectures": REMOVED}, r"architectures: \(none\)"),
    "null architectures": ({"architectures": None}, r"architectures: \(none\)"),
    "architectures as a word": ({"architectures": "LlamaForCausalLM"}, r"architectures: must be a list, got 'Llama"),
    "architectures as an object": ({"architectures": {"0": "x"}}, r"architectures: must be a list, got \{"),
    "an architecture that is no name": ({"architectures": [["x"]]}, r"architectures: must be a name, got \['x'\]"),
    "an architecture of lines": ({"architectures": ["Llama\nx"]}, r"architectures: must be a name, got 'Llama\\nx'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config: "),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act: gelu .*silu"),
    "heads": ({"num_key_value_heads": 2}, r"num_attention_heads: 9 .* num_key_value_heads, 2"),
    "more heads than numbers": ({"hidden_size": 8}, r"hidden_size: 8 is less than num_attention_heads, 9"),
    "head of odd size": ({"head_dim": 63}, r"head_dim: must be even for RoPE, got 63"),
    "head of no size": ({"head_dim": 0}, r"head_dim: must be a positive integer, got 0"),
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
    "layer types that are no names": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_act": REMOVED, "layer_types": [["full_attention"]] * 30},
        r"layer_types: \['full_attention'\] is not supported",
    ),
    "Gemma 3 with one rope for all layers": (
        {"architectures": ["Gemma3ForCausalLM"], "hidden_act": REMOVED},
        r"rope_parameters: must be given for each of full_attention, sliding_attention, got rope_theta",
    ),
    "Llama with a rope for each kind of layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        r"rope_parameters: full_attention: this architecture has one RoPE for all layers",
    ),
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


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("num_hidden_layers", 10_000),
        ("num_attention_heads", 10_000),
        ("num_key_value_heads", 10_000),
        ("head_dim", 10_000),
        ("hidden_size", 2**24),
        ("intermediate_size", 2**24),
        ("vocab_size", 2**24),
        ("max_position_embeddings", 2**31 - 1),
    ],
)
@pytest.mark.parametrize("value", [1, 10**30], ids=["one more", "many"])
def test_a_size_that_no_model_has_is_named(read: Read, key: str, most: int, value: int) -> None:
    """Scenario: a file with a few zeros too many took the memory of the machine, or overflowed in torch."""
    with pytest.raises(ModelError, match=rf"config\.json: {key}: must be at most {most}, got {most + value}$"):
        read(**{key: most + value})


@pytest.mark.parametrize("value", [5, True, ["silu"], {}, "", "a b", "x" * 101], ids=lambda value: repr(value)[:8])
@pytest.mark.parametrize("key", ["hidden_act", "dtype", "torch_dtype"])
def test_a_name_that_is_none_is_named(read: Read, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {key}: must be a name, got "):
        read(**({"dtype": REMOVED} | {key: value}))


JUNK = [
    None, True, 0, 1, -1, 1.5, float("nan"), float("inf"), 2**31, 10**400, "", "x", "x\ny", "x" * 5000, [], [[]],
    {}, {"a": 1}, {"rope_type": "linear"}, {"full_attention": 5}, ["full_attention"], [[[[1]]]], [*range(1000)],
]  # fmt: skip
KEYS: dict[str, Any] = LLAMA | {
    "final_logit_softcapping": 1.0,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["full_attention"] * 30,
    "max_window_layers": 1,
    "query_pre_attn_scalar": 64,
    "rope_parameters": None,
    "rope_scaling": LLAMA3_SCALING | {"rope_type": "llama3"},
    "sliding_window": 64,
    "use_sliding_window": True,
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_whatever_a_value_is_one_line_says_so(read: Read, architecture: str) -> None:
    """A file is read, or refused in one short line with its name; never a traceback, never hours of work."""
    good = KEYS | {"architectures": [architecture]}
    for key in good:
        for value in (*JUNK, REMOVED):
            raw = {name: each for name, each in (good | {key: value}).items() if each is not REMOVED}
            if architecture == "Gemma3ForConditionalGeneration":
                raw = {"text_config": raw, "architectures": raw.pop("architectures", None)}
            read.write("config.json", json.dumps(raw))
            try:
                read_model_config(read.folder)
            except ModelError as error:
                said = str(error).removeprefix(str(read.folder))
                assert said.startswith("/config.json: ")
                assert len(said) < 300
                assert said.isprintable()


def test_what_is_quoted_stays_short(read: Read) -> None:
    with pytest.raises(ModelError) as caught:
        read(hidden_size=list(range(10_000)))
    assert len(str(caught.value)) < 400


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist: not a Hugging Face model folder"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\udcff", "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"], ids=ascii)
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
