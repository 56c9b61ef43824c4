"""Reads single values of a Hugging Face `config.json`, and says which key is wrong."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.kernels.rope import RopeConfig
from pagoda.worker.errors import ModelError

SUPPORTED_ROPE = ("default", "linear", "llama3")


class RawConfig:
    """The object of a `config.json`. Every reader raises `ModelError` or `KeyError` naming the key."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults` stand for keys that are not there, as the architecture's authors define them."""
        self.values = {**(defaults or {}), **values}

    def get(self, key: str) -> Any:
        """None if it is absent or null."""
        return self.values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default`, if there is one, where it is absent or null."""
        if default is not None and self.values.get(key) is None:
            return default
        value = self.values[key]
        if not _is_integer(value) or value < 1:
            raise ModelError(f"{key}: must be a positive integer, got {value!r}")
        size: int = value
        return size

    def flag(self, key: str) -> bool:
        """False if it is absent or null."""
        value = self.values.get(key)
        if not isinstance(value, bool | None):
            raise ModelError(f"{key}: must be true or false, got {value!r}")
        return bool(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero; JSON as Python reads it has NaN and Infinity too."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise KeyError(key)
            return default
        if not (_is_integer(value) or isinstance(value, float)) or not 0 < value <= sys.float_info.max:
            raise ModelError(f"{key}: must be a positive number, got {value!r}")
        return float(value)

    def part(self, key: str) -> "RawConfig":
        """An object within; empty if it is absent or null."""
        value = self.values.get(key)
        if not isinstance(value, dict | None):
            raise ModelError(f"{key}: must be an object, got {value!r}")
        return RawConfig(value or {})

    def layer_windows(self, num_layers: int, *, layer_types: list[str]) -> tuple[int, ...]:
        """The window of each layer, in tokens; 0 is full attention. `layer_types` hold where the config names none."""
        named = self.values.get("layer_types")
        if named is not None:
            if not isinstance(named, list) or len(named) != num_layers:
                raise ModelError(f"layer_types: must be a list of num_hidden_layers, {num_layers}, got {named!r}")
            layer_types = named
        windows = {"full_attention": 0}
        if "sliding_attention" in layer_types:
            windows["sliding_attention"] = self.size("sliding_window")
        for kind in layer_types:
            if kind not in windows:
                raise ModelError(f"layer_types: {kind!r} is not supported; supported: {', '.join(LAYER_TYPES)}")
        return tuple(windows[kind] for kind in layer_types)

    def rope(self) -> RopeConfig:
        """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
        key = "rope_parameters" if self.values.get("rope_parameters") else "rope_scaling"
        scaling = self.part(key)
        for source in (self, scaling):
            if source.positive("partial_rotary_factor", 1.0) != 1.0:
                raise ModelError("partial_rotary_factor: only 1.0 is supported")
        return scaling.rope_scaling(theta=self.positive("rope_theta", 10000.0))

    def rope_scaling(self, *, theta: float) -> RopeConfig:
        """This object as a `rope_scaling`; `theta` holds where it names none."""
        kind = str(self.get("rope_type") or self.get("type") or "default")
        if kind not in SUPPORTED_ROPE:
            raise ModelError(f"rope_type: {kind} is not supported; supported: {', '.join(SUPPORTED_ROPE)}")
        theta = self.positive("rope_theta", theta)
        if kind == "default":
            return RopeConfig(theta)
        factor = self.positive("factor")
        if factor < 1:
            raise ModelError(f"factor: must be at least 1, got {factor}")
        if kind == "linear":
            return RopeConfig(theta, kind, factor)
        low, high = self.positive("low_freq_factor"), self.positive("high_freq_factor")
        if low >= high:
            raise ModelError(f"low_freq_factor: must be less than high_freq_factor, {high}, got {low}")
        return RopeConfig(theta, kind, factor, low, high, self.size("original_max_position_embeddings"))


LAYER_TYPES = ("full_attention", "sliding_attention")


def eos_token_ids(path: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """End-of-sequence ids that the file at `path` names."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_integer(token_id) for token_id in ids):
        raise ModelError(f"{path}: eos_token_id: must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds. Raises `ModelError` naming it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return raw


def _is_integer(value: object) -> bool:
    """To Python, true and false are integers too."""
    return isinstance(value, int) and not isinstance(value, bool)
