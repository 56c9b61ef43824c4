"""A model and a server under test. As it lies here, tests can import `local_server`."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from local_server import LocalServer
from tiny_model import write_tiny_model
from tiny_server import MODEL, serve_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Random weights that compute a token in a millisecond, with SmolLM2's tokenizer and chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer_from=smollm2, max_position=8192)


@pytest.fixture(scope="module")
def shared_server(tiny: Path) -> Iterator[LocalServer]:
    """The one of `tiny_server`; modules that need another one override it."""
    with serve_tiny(tiny) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer) -> Iterator[LocalServer]:
    """The server of the module. Whatever a test does to it, it must answer a good request afterwards."""
    yield shared_server
    answer = shared_server.openai.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    shared_server.wait_until_idle()
    assert shared_server.engine.failure is None


@pytest.fixture
def client(server: LocalServer) -> openai.OpenAI:
    return server.openai
