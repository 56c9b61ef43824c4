"""Reads safetensors checkpoints into a model, and says exactly what does not fit."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagoda.worker.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, how much is done, of how much)."""

_SHARD_INDEX = "model.safetensors.index.json"
_READ_BYTES = 2**22


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises `ModelError` if there are none or one is missing."""
    index = folder / _SHARD_INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a shard index: {error!r}") from error
        if not files:
            raise ModelError(f"{index} is not a shard index: it names no file")
    else:
        files = [folder / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)} missing; Pagoda loads safetensors checkpoints")
    return files


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint's tensor that one rank holds: `start` and on along `dim`, as many as `view` has."""

    view: torch.Tensor
    """Where it goes."""
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int = 0
    start: int = 0

    @staticmethod
    def whole(view: torch.Tensor) -> "Shard":
        return Shard(view, tuple(view.shape))

    @property
    def is_whole(self) -> bool:
        return tuple(self.view.shape) == self.shape


def check_weights(shards: Mapping[str, Shard], files: list[Path], *, ignored_prefixes: tuple[str, ...] = ()) -> None:
    """Compare the files' headers with `shards` (by the name of the tensor in the checkpoint); reads no weights.

    `ignored_prefixes` are those of tensors that the checkpoint may have besides.

    Raises `ModelError` naming file and tensor for a missing, unexpected or misshapen tensor or an unreadable file.
    """
    missing = set(shards)
    for path in files:
        with _open(path) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (it is not a dict)
                if name in shards:
                    shape, expected = checkpoint.get_slice(name).get_shape(), list(shards[name].shape)
                    if shape != expected:
                        raise ModelError(f"{path}: tensor {name} has shape {shape}, config.json asks for {expected}")
                    missing.discard(name)
                elif not _is_ignorable(name, shards) and not name.startswith(ignored_prefixes):
                    raise ModelError(f"{path}: tensor {name} has no place in this architecture")
    if missing:
        raise ModelError(f"{files[0].parent}: {len(missing)} tensors are missing, the first is {min(missing)}")


def load_weights(
    shards: Mapping[str, Shard], files: list[Path], *, ignored_prefixes: tuple[str, ...] = (), progress: Progress
) -> None:
    """Fill the shards' views (mutated), converting to their dtype and device; of each tensor only the shard is read.

    Args:
        shards: by the name of the tensor in the checkpoint.
        files: from `checkpoint_files`.
        progress: told after each tensor.

    Raises as `check_weights` does, before anything is read.
    """
    check_weights(shards, files, ignored_prefixes=ignored_prefixes)
    num_loaded = 0
    for path in files:
        with _open(path) as checkpoint:
            for name in set(checkpoint.keys()) & shards.keys():
                shard = shards[name]
                shard.view.copy_(checkpoint.get_tensor(name) if shard.is_whole else _read(checkpoint, name, shard))
                num_loaded += 1
                progress("loading weights", num_loaded, len(shards))


def _read(checkpoint: Any, name: str, shard: Shard) -> torch.Tensor:
    part = slice(shard.start, shard.start + shard.view.shape[shard.dim])
    tensor: torch.Tensor = checkpoint.get_slice(name)[(slice(None),) * shard.dim + (part,)]
    return tensor


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as checkpoint:
            yield checkpoint
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def weights_digest(folder: Path, files: list[Path]) -> bytes:
    """SHA-256 over `config.json` and every checkpoint file, names and contents: equal digests, equal weights."""
    paths = [folder / "config.json", *files]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_file_digest, paths))
    total = hashlib.sha256()
    for path, digest in zip(paths, digests, strict=True):
        total.update(hashlib.sha256(path.name.encode()).digest() + digest)
    return total.digest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.digest()


def _is_ignorable(name: str, shards: Mapping[str, Shard]) -> bool:
    """Buffers that old checkpoints carry, and a head that is tied to the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name.endswith("lm_head.weight") and name not in shards)
