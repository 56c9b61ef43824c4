"""Models for servers under test. As it lies here, tests can import `local_server`."""

from pathlib import Path

import pytest
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Random weights that compute a token in a millisecond, with SmolLM2's tokenizer and chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer_from=smollm2, max_position=8192)
