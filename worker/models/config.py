"""What a Hugging Face `config.json` says about a decoder, checked before anything is loaded."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.kernels.rope import RopeConfig
from pagoda.worker.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    """Longest context the model was made for, tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    dtype: str
    """Type of the checkpoint's weights."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised per head (Qwen3)."""
    eos_token_ids: frozenset[int]

    @staticmethod
    def from_folder(folder: Path) -> "ModelConfig":
        """Read `config.json` and `generation_config.json`. Raises `ModelError` naming file and key."""
        path = folder / "config.json"
        raw = _read_json(path)
        eos_token_ids = _eos_token_ids(path, raw)
        generation_path = folder / "generation_config.json"
        if generation_path.exists():  # which chat models extend
            eos_token_ids |= _eos_token_ids(generation_path, _read_json(generation_path))
        try:
            return _parse(raw, eos_token_ids)
        except KeyError as error:
            raise ModelError(f"{path}: key {error} is missing") from error
        except (ModelError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from error


def _parse(raw: dict[str, Any], eos_token_ids: frozenset[int]) -> ModelConfig:
    architectures = raw.get("architectures") or ["(none)"]
    architecture = str(architectures[0])
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"architectures: {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        raise ModelError("quantization_config: quantised checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act: {raw['hidden_act']} is not supported; supported: silu")
    hidden_size, vocab_size = _size(raw, "hidden_size"), _size(raw, "vocab_size")
    num_heads = _size(raw, "num_attention_heads")
    num_kv_heads = num_heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads: {num_heads} is not a multiple of num_key_value_heads, {num_kv_heads}")
    is_qwen = architecture.startswith("Qwen")
    attention_bias = _flag(raw, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        num_layers=_size(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=hidden_size // num_heads if raw.get("head_dim") is None else _size(raw, "head_dim"),
        vocab_size=vocab_size,
        max_position=_max_position(raw, is_qwen=is_qwen),
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=True if architecture == "Qwen2ForCausalLM" else attention_bias,
        output_bias=False if architecture == "Qwen2ForCausalLM" else attention_bias,
        mlp_bias=_flag(raw, "mlp_bias") and not is_qwen,
        qk_norm=architecture == "Qwen3ForCausalLM",
        # An id that the vocabulary lacks is never sampled, so it ends nothing.
        eos_token_ids=frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size),
    )


def _size(raw: dict[str, Any], key: str) -> int:
    value = raw[key]
    if not _is_integer(value) or value < 1:
        raise ModelError(f"{key}: must be a positive integer, got {value!r}")
    size: int = value
    return size


def _flag(raw: dict[str, Any], key: str) -> bool:
    """False if it is absent or null."""
    value = raw.get(key)
    if not isinstance(value, bool | None):
        raise ModelError(f"{key}: must be true or false, got {value!r}")
    return bool(value)


def _positive(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above zero; JSON as Python reads it has NaN and Infinity too."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if not (_is_integer(value) or isinstance(value, float)) or not 0 < value <= sys.float_info.max:
        raise ModelError(f"{key}: must be a positive number, got {value!r}")
    return float(value)


def _is_integer(value: object) -> bool:
    """To Python, true and false are integers too."""
    return isinstance(value, int) and not isinstance(value, bool)


def _max_position(raw: dict[str, Any], *, is_qwen: bool) -> int:
    """Up to a sliding window's length, windowed and full attention are the same; longer contexts are refused."""
    max_position = 2048 if raw.get("max_position_embeddings") is None else _size(raw, "max_position_embeddings")
    if raw.get("sliding_window") is None or (is_qwen and not _flag(raw, "use_sliding_window")):
        return max_position
    return min(max_position, _size(raw, "sliding_window"))


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"rope_parameters: must be an object, got {scaling!r}")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in SUPPORTED_ROPE:
        raise ModelError(f"rope_type: {kind} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")
    for source in (raw, scaling):
        if _positive(source, "partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("partial_rotary_factor: only 1.0 is supported")
    theta = _positive(scaling, "rope_theta", _positive(raw, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta)
    factor = _positive(scaling, "factor")
    if factor < 1:
        raise ModelError(f"factor: must be at least 1, got {factor}")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if low >= high:
        raise ModelError(f"low_freq_factor: must be less than high_freq_factor, {high}, got {low}")
    return RopeConfig(theta, kind, factor, low, high, _size(scaling, "original_max_position_embeddings"))


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> frozenset[int]:
    """End-of-sequence ids that the file at `path` names."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_integer(token_id) for token_id in ids):
        raise ModelError(f"{path}: eos_token_id: must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return raw
