"""What is found out about an engine before anything is loaded."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from pagoda.worker import engine_plan
from pagoda.worker.config import CacheConfig, EngineConfig
from pagoda.worker.engine_plan import EnginePlan, plan_engine
from pagoda.worker.errors import ConfigError

NUM_BLOCKS = 100
P = 16
CACHE_BYTES = NUM_BLOCKS * P * 2 * 2 * 2 * 8 * 4
"""Two layers, keys and values, two heads of 8, four bytes each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def plan(folder: Path, **changes: Any) -> EnginePlan:
    cache = CacheConfig(block_size=P, num_blocks=NUM_BLOCKS)
    return plan_engine(EngineConfig(folder, **({"device": "cpu", "cache": cache} | changes)))


def test_memory_that_just_suffices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache and weights together: with one byte less the engine is refused."""
    needed = CACHE_BYTES + (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: needed)
    assert plan(folder).num_blocks == NUM_BLOCKS
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"^memory_bytes: .* GiB of KV cache and .* GiB of weights"):
        plan(folder)


def test_memory_of_several_engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 3 * (CACHE_BYTES + (folder / "model.safetensors").stat().st_size)
    config = EngineConfig(folder, device="cpu", cache=CacheConfig(block_size=P, num_blocks=NUM_BLOCKS))
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: needed)
    assert plan_engine(config, num_ranks_here=3).num_blocks == NUM_BLOCKS
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"^memory_bytes: 3 times .* GiB of KV cache and .* GiB of weights"):
        plan_engine(config, num_ranks_here=3)


def test_cache_that_no_machine_holds(folder: Path) -> None:
    """By what this machine itself says. Linux would hand out such memory, and kill who writes to it."""
    with pytest.raises(ConfigError, match=r"^memory_bytes: 524288\.0 GiB of KV cache"):
        plan(folder, cache=CacheConfig(memory_bytes=2**49))


def test_memory_is_not_asked_for_without_a_model_to_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake step computes nothing, so it needs none; nor is any refused where the system does not tell."""
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: 0)
    assert plan(folder, fake_step_s=0.0).num_blocks == NUM_BLOCKS
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: None)
    assert plan(folder).num_blocks == NUM_BLOCKS


def test_a_pool_without_a_block_for_each_group_is_refused(folder: Path, tmp_path: Path) -> None:
    """It could run nothing. Of this model two layers of three have windows, in groups of their own."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path)
    num_groups = len(plan(tmp_path).spec.groups)
    assert num_groups > 1
    with pytest.raises(ConfigError, match=rf"num_blocks: must be at least {num_groups}, one for each group of layers"):
        plan(tmp_path, cache=CacheConfig(num_blocks=num_groups - 1))
