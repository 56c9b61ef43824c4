"""Reads safetensors checkpoints into a model, and says exactly what does not fit."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


def check_weights(views: Mapping[str, torch.Tensor], files: list[Path]) -> None:
    """Compare the files' headers with `views` (checkpoint tensor name -> where it would go); reads no weights.

    Raises `ModelError` naming file and tensor for a missing, unexpected or misshapen tensor or an unreadable file.
    """
    missing = set(views)
    for path in files:
        with _open(path) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (it is not a dict)
                if name in views:
                    shape, expected = checkpoint.get_slice(name).get_shape(), list(views[name].shape)
                    if shape != expected:
                        raise ModelError(f"{path}: tensor {name} has shape {shape}, config.json asks for {expected}")
                    missing.discard(name)
                elif not _is_ignorable(name, views):
                    raise ModelError(f"{path}: tensor {name} has no place in this architecture")
    if missing:
        raise ModelError(f"{files[0].parent}: {len(missing)} tensors are missing, the first is {min(missing)}")


def load_weights(views: Mapping[str, torch.Tensor], files: list[Path], *, progress: Progress) -> None:
    """Fill `views` (mutated), converting to their dtype and device.

    Args:
        views: checkpoint tensor name -> where it goes.
        files: from `checkpoint_files`.
        progress: told after each tensor.

    Raises as `check_weights` does, before anything is read.
    """
    check_weights(views, files)
    num_loaded = 0
    for path in files:
        with _open(path) as checkpoint:
            for name in set(checkpoint.keys()) & views.keys():
                views[name].copy_(checkpoint.get_tensor(name))
                num_loaded += 1
                progress("loading weights", num_loaded, len(views))


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


def _is_ignorable(name: str, views: Mapping[str, torch.Tensor]) -> bool:
    """Buffers that old checkpoints carry, and a head that is tied to the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in views)
