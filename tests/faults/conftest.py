"""The model of fake clusters: what counts of it is its tokenizer."""

from pathlib import Path

import pytest
from fake_model import write_fake_model


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("models") / "fake", smollm2)
