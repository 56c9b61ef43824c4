"""What `pagoda model inspect` shows: facts of a model's KV memory, and how they are laid out for people."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.worker.config import CacheConfig, SchedulerConfig, require_in_range
from pagoda.worker.errors import ModelError
from pagoda.worker.kv_arithmetic import DTYPE_BYTES, KVFigures
from pagoda.worker.kv_spec import KVCacheGroup
from pagoda.worker.models.outline import ModelOutline, read_outline
from pagoda.worker.weights import checkpoint_files, checkpoint_size

_MAX_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class InspectSettings:
    """For what the memory is reckoned."""

    memory_bytes: int
    """Of KV blocks, on each rank."""
    dtype: str
    """Of the KV; auto takes the checkpoint's."""
    block_size: int
    context_len: int | None
    """Tokens of the requests that are counted; None: the model's longest."""
    tensor_parallel_size: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        CacheConfig(block_size=self.block_size, memory_bytes=self.memory_bytes)
        SchedulerConfig(max_num_batched_tokens=self.max_num_batched_tokens)
        if self.context_len is not None:
            require_in_range("context_len", self.context_len, 1, _MAX_CONTEXT)


def model_facts(folder: Path, settings: InspectSettings) -> dict[str, Any]:
    """All that is shown, by names that stay. KV is that of one of `tensor_parallel_size` ranks.

    Raises `ModelError` for the folder, `ConfigError` for a setting that contradicts the model.
    """
    outline = read_outline(folder)
    local = outline.attention.on_one_of(settings.tensor_parallel_size)
    dtype = _dtype(folder, outline, settings)
    figures = KVFigures(
        spec=local.cache_spec(block_size=settings.block_size, dtype_bytes=DTYPE_BYTES[dtype]),
        memory_bytes=settings.memory_bytes,
        context_len=settings.context_len or outline.max_position,
        max_step_tokens=settings.max_num_batched_tokens,
    )
    whole = outline.attention
    return {
        "architecture": outline.architecture,
        "is_supported": outline.is_supported,
        "num_layers": len(whole.windows),
        "hidden_size": outline.hidden_size,
        "num_heads": whole.num_heads,
        "num_kv_heads": whole.num_kv_heads,
        "head_size": whole.head_size,
        "attention": whole.kind,
        "latent_size": whole.latent_size or None,
        "max_position": outline.max_position,
        "weights": _weights(folder),
        "tensor_parallel_sizes": list(whole.tensor_parallel_sizes),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "num_heads_per_rank": local.num_heads,
        "num_kv_heads_per_rank": local.num_kv_heads,
        "groups": [{"layers": list(group.layers), "window": group.window} for group in figures.spec.groups],
        "dtype": dtype,
        "token_bytes": figures.spec.token_bytes,
        "lasting_token_bytes": figures.lasting_token_bytes,
        "window_bytes": figures.window_bytes,
        "block_size": settings.block_size,
        "block_bytes": figures.spec.block_bytes,
        "memory_bytes": settings.memory_bytes,
        "num_blocks": figures.num_blocks,
        "num_tokens": figures.num_tokens,
        "max_request_tokens": figures.max_request_tokens,
        "context_len": figures.context_len,
        "request_bytes": figures.request_bytes,
        "num_requests": figures.num_requests,
    }


def _dtype(folder: Path, outline: ModelOutline, settings: InspectSettings) -> str:
    dtype = outline.dtype if settings.dtype == "auto" else settings.dtype
    if dtype not in DTYPE_BYTES:
        choices = ", ".join(DTYPE_BYTES)
        raise ModelError(f"{folder}: dtype {dtype} is not supported; choose --dtype from {choices}")
    return dtype


def _weights(folder: Path) -> dict[str, Any]:
    try:
        num_parameters, num_bytes = checkpoint_size(checkpoint_files(folder))
    except ModelError as error:  # nothing else here needs them
        return {"num_parameters": None, "num_bytes": None, "problem": str(error)}
    return {"num_parameters": num_parameters, "num_bytes": num_bytes, "problem": None}


def facts_as_text(facts: dict[str, Any]) -> str:
    """The facts, one a line, aligned."""
    lines = list(_lines(facts))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:{width}}  {text}" for label, text in lines)


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    groups = [KVCacheGroup(tuple(group["layers"]), group["window"]) for group in facts["groups"]]
    yield "architecture", facts["architecture"] + ("" if facts["is_supported"] else " (serving it is not supported)")
    yield "layers", f"{facts['num_layers']}, hidden size {facts['hidden_size']}"
    kv_heads = "" if facts["attention"] == "MLA" else f", {facts['num_kv_heads']} KV"
    yield "heads", f"{facts['num_heads']} query{kv_heads}, of {facts['head_size']} numbers"
    yield "attention", _attention(facts)
    yield "layer groups", "; ".join(dict.fromkeys(_group(group, groups) for group in groups))
    yield "longest context", f"{facts['max_position']} tokens"
    yield "weights", _weights_text(facts["weights"])
    yield "TP sizes", ", ".join(map(str, facts["tensor_parallel_sizes"]))
    if facts["tensor_parallel_size"] > 1:
        yield f"on each of {facts['tensor_parallel_size']} ranks:", _rank(facts)
    yield "KV dtype", facts["dtype"]
    token_bytes = facts["token_bytes"]
    yield "KV of a token", f"{_bytes(token_bytes)} ({token_bytes} bytes) while all layers hold it"
    if facts["window_bytes"]:
        yield "outside windows", f"{_bytes(facts['lasting_token_bytes'])} of a token are kept"
        yield "inside windows", f"at most {_bytes(facts['window_bytes'])} of a request, however long"
    yield "block", f"{_bytes(facts['block_bytes'])}: {facts['block_size']} tokens of a group's layers"
    yield (
        "cache",
        f"{_bytes(facts['memory_bytes'])}: {facts['num_blocks']} blocks, {facts['num_tokens']} tokens in all layers",
    )
    if facts["window_bytes"]:
        longest = facts["max_request_tokens"]
        yield "longest request", "of any length" if longest is None else f"{longest} tokens"
    beyond = ", more than the model was made for" if facts["context_len"] > facts["max_position"] else ""
    takes = _bytes(facts["request_bytes"])
    yield "request", f"{facts['context_len']} tokens{beyond}: {takes}; {facts['num_requests']} fit at once"


def _attention(facts: dict[str, Any]) -> str:
    if facts["attention"] == "MLA":
        return f"MLA, {facts['latent_size']} numbers a token and layer, the same on every rank"
    if facts["attention"] == "GQA":
        return f"GQA x{facts['num_heads'] // facts['num_kv_heads']}"
    return str(facts["attention"])


def _group(group: KVCacheGroup, groups: list[KVCacheGroup]) -> str:
    alike = [each for each in groups if (len(each.layers), each.window) == (len(group.layers), group.window)]
    sees = f"window {group.window}" if group.window else "full attention"
    return f"{len(alike)} of {len(group.layers)} layers, {sees}"


def _rank(facts: dict[str, Any]) -> str:
    if facts["attention"] == "MLA":
        return f"{facts['num_heads_per_rank']} query heads, and the whole latent"
    return f"{facts['num_heads_per_rank']} query, {facts['num_kv_heads_per_rank']} KV heads"


def _weights_text(weights: dict[str, Any]) -> str:
    if weights["problem"] is not None:
        return f"not here ({weights['problem']})"
    return f"{weights['num_parameters'] / 1e6:.1f} million parameters, {_bytes(weights['num_bytes'])}"


def _bytes(count: int) -> str:
    """In the largest unit of which there is at least one."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{count} bytes"
