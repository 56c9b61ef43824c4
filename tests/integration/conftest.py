"""Models for servers under test. As it lies here, tests can import `local_server`."""

from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from pagoda.worker.model_store import ModelStore


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched once for this machine."""
    return ModelStore(Path.home() / ".cache" / "pagoda" / "models").fetch("smollm2-135m", progress=lambda *_: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Random weights that compute a token in a millisecond, with SmolLM2's tokenizer and chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer_from=smollm2, max_position=8192)
