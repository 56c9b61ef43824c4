"""What `config.json` says of a model's size, also of models whose KV can be reckoned but that cannot be served yet."""

from dataclasses import dataclass
from pathlib import Path

from pagoda.worker.errors import ModelError
from pagoda.worker.kv_arithmetic import AttentionShape
from pagoda.worker.models.families import FAMILIES, read_model_config
from pagoda.worker.models.raw_config import RawConfig, read_json

RECKONED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures with MLA, that are not served."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model in a few numbers."""

    architecture: str
    is_supported: bool
    """Whether Pagoda serves this architecture."""
    hidden_size: int
    max_position: int
    """Longest context the model was made for, tokens."""
    dtype: str
    """Type of the checkpoint's weights."""
    attention: AttentionShape


def read_outline(folder: Path) -> ModelOutline:
    """Read `config.json`; weights need not be there. Raises `ModelError` naming file and key."""
    path = folder / "config.json"
    raw = RawConfig(read_json(path))
    try:
        architecture = raw.architecture()
        if architecture in RECKONED:
            return _with_mla(architecture, raw)
        if architecture not in FAMILIES:
            known = ", ".join((*FAMILIES, *RECKONED))
            raise ModelError(f"architectures: {architecture} is not known; known: {known}")
    except KeyError as error:
        raise ModelError(f"{path}: key {error} is missing") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    model = read_model_config(folder)
    return ModelOutline(
        architecture=architecture,
        is_supported=True,
        hidden_size=model.hidden_size,
        max_position=model.max_position,
        dtype=model.dtype,
        attention=AttentionShape(
            windows=tuple(layer.window for layer in model.layers),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            tensor_parallel_sizes=model.tensor_parallel_sizes,
        ),
    )


def _with_mla(architecture: str, raw: RawConfig) -> ModelOutline:
    """Ranks share query heads and feed-forward; each has the whole latent."""
    num_heads, intermediate_size = raw.count("num_attention_heads"), raw.size("intermediate_size")
    rope_size = raw.size("qk_rope_head_dim")
    return ModelOutline(
        architecture=architecture,
        is_supported=False,
        hidden_size=raw.size("hidden_size"),
        max_position=raw.tokens("max_position_embeddings"),
        dtype=raw.dtype(),
        attention=AttentionShape(
            windows=(0,) * raw.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=raw.size("qk_nope_head_dim") + rope_size,
            latent_size=raw.size("kv_lora_rank") + rope_size,
            tensor_parallel_sizes=tuple(
                size for size in range(1, num_heads + 1) if num_heads % size == intermediate_size % size == 0
            ),
        ),
    )
