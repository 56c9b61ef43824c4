"""What each architecture's `config.json` means: its own keys, and what its code does without a key for it.

Defaults of absent keys are those of the architecture's published configuration class, which checkpoints rely on.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagoda.kernels.interface import Activation
from pagoda.worker.errors import ModelError
from pagoda.worker.models.config import LayerConfig, ModelConfig
from pagoda.worker.models.raw_config import RawConfig, eos_token_ids, read_json

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json`. Raises `ModelError` naming file and key."""
    path = folder / "config.json"
    raw = read_json(path)
    ends = eos_token_ids(path, raw)
    generation_path = folder / "generation_config.json"
    if generation_path.exists():  # which chat models extend
        ends |= eos_token_ids(generation_path, read_json(generation_path))
    try:
        return _parse(raw, ends)
    except KeyError as error:
        raise ModelError(f"{path}: key {error} is missing") from error
    except (ModelError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _parse(values: Mapping[str, Any], ends: frozenset[int]) -> ModelConfig:
    architecture = str((values.get("architectures") or ["(none)"])[0])
    if architecture not in FAMILIES:
        raise ModelError(f"architectures: {architecture} is not supported; supported: {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        raise ModelError("quantization_config: quantised checkpoints are not supported")
    config = FAMILIES[architecture](architecture, RawConfig(values))
    # An id that the vocabulary lacks is never sampled, so it ends nothing.
    known = frozenset(token_id for token_id in ends if 0 <= token_id < config["vocab_size"])
    return ModelConfig(architecture=architecture, eos_token_ids=known, **config)


def _decoder(raw: RawConfig, *, activation: str = "silu", activation_key: str = "hidden_act") -> dict[str, Any]:
    """What all families have in common: a Llama without biases, norms of heads or windows."""
    activation = str(raw.get(activation_key) or activation)
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{activation_key}: {activation} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    hidden_size, num_layers = raw.size("hidden_size"), raw.size("num_hidden_layers")
    num_heads = raw.size("num_attention_heads")
    num_kv_heads = raw.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads: {num_heads} is not a multiple of num_key_value_heads, {num_kv_heads}")
    head_size = raw.size("head_dim", hidden_size // num_heads)
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": raw.size("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "vocab_size": raw.size("vocab_size"),
        "max_position": raw.size("max_position_embeddings", 2048),
        "rms_norm_eps": raw.positive("rms_norm_eps", 1e-6),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        "tie_word_embeddings": raw.flag("tie_word_embeddings"),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "activation": _ACTIVATIONS[activation],
        "attention_scale": head_size**-0.5,
    }


def _layers(raw: RawConfig, windows: tuple[int, ...]) -> dict[str, Any]:
    rope = raw.rope()
    return {"layers": tuple(LayerConfig(window, rope) for window in windows)}


def _llama(_: str, raw: RawConfig) -> dict[str, Any]:
    config = _decoder(raw)
    return config | _biases(raw) | _layers(raw, (0,) * config["num_layers"])


def _biases(raw: RawConfig) -> dict[str, Any]:
    bias = raw.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": raw.flag("mlp_bias")}


def _mistral(_: str, raw: RawConfig) -> dict[str, Any]:
    """Every layer has the window, if there is one."""
    raw = RawConfig(raw.values, {"sliding_window": 4096})
    config = _decoder(raw)
    window = 0 if raw.get("sliding_window") is None else raw.size("sliding_window")
    return config | _biases(raw) | _layers(raw, (window,) * config["num_layers"])


def _qwen(architecture: str, raw: RawConfig) -> dict[str, Any]:
    """Layers from `max_window_layers` on have a window if `use_sliding_window` says so, unless `layer_types` does."""
    raw = RawConfig(raw.values, {"max_window_layers": 28, "sliding_window": 4096})
    config = _decoder(raw)
    num_layers, types = config["num_layers"], ["full_attention"] * config["num_layers"]
    if raw.flag("use_sliding_window") and raw.get("sliding_window") is not None:
        first = raw.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ModelError(f"max_window_layers: must be a non-negative integer, got {first!r}")
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
        config |= _layers(raw, raw.layer_windows(num_layers, layer_types=types))
    else:
        config |= _layers(raw, (0,) * num_layers)  # transformers, too, hides nothing then, whatever the types say
    if architecture == "Qwen2ForCausalLM":
        return config | {"qkv_bias": True}
    bias = raw.flag("attention_bias")
    return config | {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


def _gemma_decoder(raw: RawConfig, activation_key: str) -> dict[str, Any]:
    if raw.flag("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: true is not supported; Pagoda serves decoders")
    config = _decoder(raw, activation="gelu_pytorch_tanh", activation_key=activation_key)
    bias = raw.flag("attention_bias")
    return config | {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_offset": 1.0,
        "embedding_scale": config["hidden_size"] ** 0.5,
    }


_GEMMA_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _gemma(_: str, raw: RawConfig) -> dict[str, Any]:
    """The first one. Its early configs say `gelu` and mean the approximation by tanh."""
    raw = RawConfig(raw.values, _GEMMA_DEFAULTS)
    if raw.get("hidden_activation") is None and raw.get("hidden_act") in (None, "gelu"):
        raw.values["hidden_activation"] = "gelu_pytorch_tanh"
    elif raw.get("hidden_activation") is None:
        raw.values["hidden_activation"] = raw.get("hidden_act")
    config = _gemma_decoder(raw, "hidden_activation")
    return config | _layers(raw, (0,) * config["num_layers"])


def _gemma2(_: str, raw: RawConfig) -> dict[str, Any]:
    """Every second layer has a window, beginning with the first. Source: arXiv:2408.00118, sec. 2."""
    soft_caps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    raw = RawConfig(raw.values, _GEMMA2_DEFAULTS | soft_caps)
    config = _gemma_decoder(raw, "hidden_activation")
    num_layers = config["num_layers"]
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    config |= _layers(raw, raw.layer_windows(num_layers, layer_types=types))
    return config | {
        "has_output_norms": True,
        "attention_scale": raw.positive("query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": _soft_cap(raw, "attn_logit_softcapping"),
        "logit_soft_cap": _soft_cap(raw, "final_logit_softcapping"),
    }


def _gemma3(_: str, raw: RawConfig) -> dict[str, Any]:
    """Five layers with a window, then one without, which has a RoPE base of its own. Source: arXiv:2503.19786, sec. 2.

    Attention has no soft cap, whatever the config says: neither has it in transformers.
    """
    raw = RawConfig(raw.values, _GEMMA2_DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072})
    config = _gemma_decoder(raw, "hidden_activation")
    num_layers, period = config["num_layers"], raw.size("sliding_window_pattern", 6)
    types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    windows = raw.layer_windows(num_layers, layer_types=types)
    ropes = raw.part("rope_parameters")
    wide, near = ropes.part("full_attention"), ropes.part("sliding_attention")
    if not ropes.values:  # as before transformers 5
        wide = raw.part("rope_scaling")
    full_rope = wide.rope_scaling(theta=raw.positive("rope_theta", 1_000_000.0))
    window_rope = near.rope_scaling(theta=raw.positive("rope_local_base_freq", 10_000.0))
    return config | {
        "layers": tuple(LayerConfig(window, window_rope if window else full_rope) for window in windows),
        "qk_norm": True,
        "has_output_norms": True,
        "attention_scale": raw.positive("query_pre_attn_scalar") ** -0.5,
        "logit_soft_cap": _soft_cap(raw, "final_logit_softcapping"),
    }


def _gemma3_with_images(architecture: str, raw: RawConfig) -> dict[str, Any]:
    """Its language model; images are not supported, so what reads them is left out."""
    text = raw.part("text_config").values
    outer = {key: raw.values[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in raw.values}
    return _gemma3(architecture, RawConfig(outer | text)) | {
        "tensor_prefix": "language_model.model.",
        "ignored_prefixes": ("vision_tower.", "multi_modal_projector."),
    }


def _soft_cap(raw: RawConfig, key: str) -> float:
    return 0.0 if raw.get(key) is None else raw.positive(key)


FAMILIES: dict[str, Callable[[str, RawConfig], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_images,
}
"""Architecture, as `config.json` names it -> what it means."""
