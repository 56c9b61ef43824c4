"""`pagoda model inspect`: a model's KV memory from its config.json, for people and for machines."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny_model import write_tiny_model

from pagoda.cluster.cli import main

LLAMA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
MISTRAL: dict[str, Any] = LLAMA_7B | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 8}
DEEPSEEK: dict[str, Any] = LLAMA_7B | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
# fmt: off
KEYS = [
    "architecture", "is_supported", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "attention",
    "latent_size", "max_position", "weights", "tensor_parallel_sizes", "tensor_parallel_size", "num_heads_per_rank",
    "num_kv_heads_per_rank", "groups", "dtype", "token_bytes", "lasting_token_bytes", "window_bytes", "block_size",
    "block_bytes", "memory_bytes", "num_blocks", "num_tokens", "max_request_tokens", "context_len", "request_bytes",
    "num_requests",
]
# fmt: on


def inspect(folder: Path, raw: dict[str, Any] | None, *options: str) -> Result:
    if raw is not None:
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return CliRunner().invoke(main, ["model", "inspect", str(folder), *options])


def facts(folder: Path, raw: dict[str, Any] | None, *options: str) -> dict[str, Any]:
    result = inspect(folder, raw, "--json", *options)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def error(folder: Path, raw: dict[str, Any] | None, *options: str) -> str:
    """The one line that is said; nothing must come on standard output."""
    result = inspect(folder, raw, *options)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("Error: ")


def test_what_people_see(tmp_path: Path) -> None:
    """Without weights, which is said; and of a context that the model itself could not have."""
    lines = inspect(tmp_path, LLAMA_7B, "--context-len", "32768", "--kv-cache-gib", "80").stdout.splitlines()
    labels, texts = [line[:17].rstrip() for line in lines], [line[17:] for line in lines]
    assert dict(zip(labels, texts, strict=True)) == {
        "architecture": "LlamaForCausalLM",
        "layers": "32, hidden size 4096",
        "heads": "32 query, 32 KV, of 128 numbers",
        "attention": "MHA",
        "layer groups": "1 of 32 layers, full attention",
        "longest context": "2048 tokens",
        "weights": f"not here ({tmp_path}: model.safetensors missing; Pagoda loads safetensors checkpoints)",
        "TP sizes": "1, 2, 4, 8, 16, 32",
        "KV dtype": "float16",
        "KV of a token": "512 KiB (524288 bytes) while all layers hold it",
        "block": "8 MiB: 16 tokens of a group's layers",
        "cache": "80 GiB: 10240 blocks, 163840 tokens in all layers",
        "request": "32768 tokens, more than the model was made for: 16 GiB; 5 fit at once",
    }


def test_what_people_see_of_windows_and_ranks(tmp_path: Path) -> None:
    text = inspect(tmp_path, MISTRAL | {"max_position_embeddings": 32768}, "--tp", "16").stdout
    for line in (
        r"attention             GQA x4",
        r"layer groups          1 of 32 layers, window 4096",
        r"on each of 16 ranks:  2 query, 1 KV heads",
        r"outside windows       0 bytes of a token are kept",
        r"inside windows        at most 80.75 MiB of a request, however long",
        r"longest request       of any length",
        r"request               32768 tokens: 80.75 MiB; 12 fit at once",
    ):
        assert line in text.splitlines()


def test_a_model_that_cannot_be_served_yet(tmp_path: Path) -> None:
    lines = inspect(tmp_path, DEEPSEEK, "--tp", "2").stdout.splitlines()
    assert lines[0].endswith("DeepseekV2ForCausalLM (serving it is not supported)")
    assert "MLA, 576 numbers a token and layer, the same on every rank" in lines[3]
    found = facts(tmp_path, DEEPSEEK, "--tp", "2")
    assert (found["is_supported"], found["latent_size"], found["token_bytes"]) == (False, 576, 576 * 32 * 2)


def test_what_machines_see(tmp_path: Path) -> None:
    """The names stay."""
    found = facts(tmp_path, MISTRAL, "--tp", "2", "--dtype", "float32", "--block-size", "32", "--kv-cache-gib", "2")
    assert list(found) == KEYS
    assert found["groups"] == [{"layers": list(range(32)), "window": 4096}]
    assert (found["dtype"], found["num_kv_heads"], found["num_kv_heads_per_rank"]) == ("float32", 8, 4)
    assert found["block_bytes"] == 32 * found["token_bytes"] == 32 * 32 * 2 * 4 * 128 * 4
    assert (found["memory_bytes"], found["num_blocks"], found["context_len"]) == (2**31, 512, 2048)
    assert facts(tmp_path, MISTRAL, "--max-num-batched-tokens", "1")["window_bytes"] == (257 + 3) * 2**21


def test_weights_that_are_there_are_counted(tmp_path: Path) -> None:
    """By their headers: the embedding, two layers and the last norm, in float32."""
    folder = write_tiny_model(tmp_path)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32
    count = 259 * 32 + 2 * layer + 32
    assert facts(folder, None)["weights"] == {"num_parameters": count, "num_bytes": 4 * count, "problem": None}
    (folder / "model.safetensors").write_bytes(b"cut")
    assert "model.safetensors cannot be read" in facts(folder, None)["weights"]["problem"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tp", "3"), "--tp: 3 ranks cannot share this model evenly; it allows 1, 2, 4, 8, 16, 32"),
        (("--tp", "0"), "--tp: 0 ranks cannot share"),
        (("--context-len", "0"), "--context-len: must be between 1 and"),
        (("--block-size", "0"), "--block-size: must be between 1 and 1024, got 0"),
        (("--kv-cache-gib", "nan"), "--kv-cache-gib: must be between"),
        (("--kv-cache-gib", "0.001"), "--kv-cache-gib: 1073741 bytes of KV cache hold no block"),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens: must be between"),
    ],
)
def test_bad_option_names_itself(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    assert error(tmp_path, LLAMA_7B, *options).startswith(said)


def test_models_that_cannot_be_inspected(tmp_path: Path) -> None:
    """The file, the key and what would do."""
    said = error(tmp_path, LLAMA_7B | {"architectures": ["GPT2LMHeadModel"]})
    assert said.startswith(f"{tmp_path}/config.json: architectures: GPT2LMHeadModel is not known; known: Llama")
    assert "dtype float8 is not supported; choose --dtype from" in error(tmp_path, LLAMA_7B | {"torch_dtype": "float8"})
    (tmp_path / "config.json").unlink()
    assert "it has no config.json" in error(tmp_path, None)
    result = CliRunner().invoke(main, ["model", "inspect", "no-such-model", "--model-cache", str(tmp_path)])
    assert "'no-such-model' is neither a model folder nor a stored model" in result.stderr
