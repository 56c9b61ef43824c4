"""Reads safetensors checkpoints into a model, and says exactly what does not fit."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagoda.worker.errors import ModelError
from pagoda.worker.quoting import quoted

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, how much is done, of how much)."""

_SHARD_INDEX = "model.safetensors.index.json"
_READ_BYTES = 2**22
_MAX_NAME = 200
_MAX_HEADER_BYTES = 10**8
"""As safetensors itself allows."""
_DTYPES = ("F64", "F32", "F16", "BF16")
"""Of tensors that can be loaded, as safetensors call them."""


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises `ModelError` if there are none or one is missing."""
    index = folder / _SHARD_INDEX
    if index.exists():
        try:
            names = sorted(set(_weight_map(folder).values()))
            files = [folder / name for name in names]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"{index} is not a shard index: {error!r}") from error
        if not files:
            raise ModelError(f"{index} is not a shard index: it names no file")
        for name in names:
            if Path(name).name != name or not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
                raise ModelError(f"{index} is not a shard index: {quoted(name)} is not a file's name")
    else:
        files = [folder / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if (folder / missing[0]).is_dir():
            raise ModelError(f"{folder}: {missing[0]} is a folder, not a file")
        lost = min((tensor for tensor, name in _weight_map(folder).items() if name == missing[0]), default=None)
        of_what = "" if lost is None else f", with tensor {quoted(lost)} and others"
        raise ModelError(f"{folder}: {missing[0]}{more} missing{of_what}; Pagoda loads safetensors checkpoints")
    return files


def _weight_map(folder: Path) -> dict[str, str]:
    """What the index says of tensors: in which file each is. Empty without an index."""
    index = folder / _SHARD_INDEX
    if not index.exists():
        return {}
    names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return names


def checkpoint_size(files: list[Path]) -> tuple[int, int]:
    """How many numbers the files' tensors have, and how many bytes, by their headers. Raises `ModelError`."""
    num_parameters = num_bits = 0
    for path in files:
        with _open(path) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (it is not a dict)
                tensor = checkpoint.get_slice(name)
                count = math.prod(tensor.get_shape())
                num_parameters += count
                num_bits += count * _bits(tensor.get_dtype())
    return num_parameters, num_bits // 8


def _bits(dtype: str) -> int:
    """Of one number: BF16 has 16, F8_E4M3 has 8, BOOL has 8."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


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
    found: dict[str, Path] = {}
    for path in files:
        with _open(path) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (it is not a dict)
                if name in shards:
                    if name in found:
                        raise ModelError(f"{path}: tensor {name} is in {found[name].name} too")
                    found[name] = path
                    if (problem := _problem_with(checkpoint.get_slice(name), shards[name])) is not None:
                        raise ModelError(f"{path}: tensor {name} {problem}")
                elif not _is_ignorable(name, shards) and not name.startswith(ignored_prefixes):
                    shown = name if name.isprintable() and len(name) <= _MAX_NAME else quoted(name)
                    raise ModelError(f"{path}: tensor {shown} has no place in the model that config.json describes")
    if missing := shards.keys() - found.keys():
        raise ModelError(_where_missing(missing, files))


def _problem_with(tensor: Any, shard: Shard) -> str | None:
    shape, dtype = tensor.get_shape(), tensor.get_dtype()
    if shape != list(shard.shape):
        return f"has shape {shape}, config.json asks for {list(shard.shape)}"
    if dtype not in _DTYPES:  # would be converted all the same, and mean something else
        return f"has dtype {dtype}, supported: {', '.join(_DTYPES)}; quantised checkpoints are not supported"
    return None


def _where_missing(missing: Set[str], files: list[Path]) -> str:
    name, folder = min(missing), files[0].parent
    more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
    listed = _weight_map(folder).get(name)
    if listed is not None:
        return f"{folder / listed}: tensor {name} is not there, where {_SHARD_INDEX} says it is{more}"
    where = files[0] if len(files) == 1 else folder / _SHARD_INDEX
    return f"{where}: tensor {name}, which config.json asks for, is missing{more}"


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
        raise ModelError(f"{path} cannot be read: {_cause(path) or error}") from error


def _cause(path: Path) -> str | None:
    """What is wrong with a file that safetensors only calls malformed: the two things that befall whole folders."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start + file.read(16) == b"version https://git-lfs.":
                return "it is a Git LFS pointer; `git lfs pull` brings what it points to"
            file.seek(8)
            num_header_bytes = int.from_bytes(start, "little")
            header = json.loads(file.read(num_header_bytes)) if num_header_bytes <= _MAX_HEADER_BYTES else {}
        ends = {name: tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"}
        num_bytes, num_expected = path.stat().st_size, 8 + num_header_bytes + max(ends.values(), default=0)
        if num_bytes >= num_expected:
            return None
        first = min((end, name) for name, end in ends.items() if 8 + num_header_bytes + end > num_bytes)[1]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return f"it has {num_bytes} of {num_expected} bytes; tensor {first} is the first that is not whole"


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
