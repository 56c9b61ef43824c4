"""Tiny random checkpoints, one for each thing that architectures of the Llama family differ in."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
NUM_ANSWER_TOKENS = 12
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))


def mistral(**changes: Any) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**(SIZES | {"sliding_window": None} | changes)))


WINDOW = 7
"""Less than two blocks of the tests', and than most prompts."""
GEMMA_SIZES = SIZES | {"head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 20}


def gemma(**changes: Any) -> GemmaForCausalLM:
    return GemmaForCausalLM(GemmaConfig(**(SIZES | {"head_dim": 16, "tie_word_embeddings": True} | changes)))


def gemma2(**changes: Any) -> Gemma2ForCausalLM:
    """Soft caps small enough to matter."""
    sizes = GEMMA_SIZES | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return Gemma2ForCausalLM(Gemma2Config(**(sizes | {"attn_implementation": "eager"} | changes)))


def gemma3_config(**changes: Any) -> Gemma3TextConfig:
    """Five layers with a window, one without, and the rest of a second such period."""
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    sizes = GEMMA_SIZES | {"sliding_window": WINDOW, "num_hidden_layers": 8, "rope_parameters": rope}
    return Gemma3TextConfig(**(sizes | changes))


def gemma3_with_images() -> Gemma3ForConditionalGeneration:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    tokens = {"image_token_index": 93, "boi_token_index": 94, "eoi_token_index": 95, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=gemma3_config().to_dict(), vision_config=vision, **tokens)
    config._attn_implementation = "eager"
    return Gemma3ForConditionalGeneration(config)


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "Llama 2, MHA": lambda: llama(num_key_value_heads=4),
    "Llama 3, GQA": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "Llama, linear rope, MQA": lambda: llama(rope_parameters=LINEAR_ROPE, num_key_value_heads=1),
    "Llama, all biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "Llama, head size of its own": lambda: llama(head_dim=16),
    "Mistral": mistral,
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "Qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**(SIZES | {"tie_word_embeddings": True}))),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"head_dim": 24}))),
    "Mistral, window": lambda: mistral(sliding_window=WINDOW),
    "Qwen2, window in the upper layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(**(SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}))
    ),
    "Gemma": gemma,
    "Gemma 2, GQA": gemma2,
    "Gemma 2, MQA": lambda: gemma2(num_key_value_heads=1),
    "Gemma 3, GQA": lambda: Gemma3ForCausalLM(gemma3_config()),
    "Gemma 3, MQA": lambda: Gemma3ForCausalLM(gemma3_config(num_key_value_heads=1, final_logit_softcapping=5.0)),
    "Gemma 3, with images": gemma3_with_images,
    "Llama 3, old config.json": lambda: llama(rope_parameters=LLAMA3_ROPE),
}


def make_checkpoint(name: str, folder: Path, *, ending: Sequence[int]) -> Any:
    """Save a checkpoint in float32 and return the transformers model. It ends its answer to the prompt `ending`."""
    torch.manual_seed(sum(name.encode()))
    model = CHECKPOINTS[name]().float().eval()
    _randomise_vectors(model)
    answer = model.generate(torch.tensor([ending]), do_sample=False, max_new_tokens=NUM_ANSWER_TOKENS)
    model.config.eos_token_id = model.generation_config.eos_token_id = [3, int(answer[0, -1])]
    model.save_pretrained(folder)
    if "old config.json" in name:
        _spell_as_before_transformers_5(folder / "config.json")
    return model


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Norms start as ones and biases as zeros, so that swapping or dropping them would show nowhere."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, *((-0.5, 0.5) if name.endswith("bias") else (0.5, 1.5)))


def _spell_as_before_transformers_5(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw), encoding="utf-8")
