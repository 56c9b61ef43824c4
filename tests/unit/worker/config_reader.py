"""Writes a model's `config.json` and reads it as an engine does."""

import json
from pathlib import Path
from typing import Any

from pagoda.worker.models.config import ModelConfig
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
REMOVED = object()
"""In place of a value: the key is not there."""


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
