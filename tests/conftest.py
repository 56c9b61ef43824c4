"""Settings for all tests, and the real model. As it lies here, tests can import its neighbours, such as `fakes`."""

from pathlib import Path

import pytest
from hypothesis import settings

from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore

settings.register_profile("default", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=10_000, deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched once for this machine."""
    return ModelStore(DEFAULT_STORE).fetch(DEFAULT_MODEL, progress=lambda *_: None)
