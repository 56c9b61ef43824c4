"""The real model, and a count of near-ties at the end of the run. As it lies here, tests can import `oracle`."""

from pathlib import Path

import pytest
from oracle import NEAR_TIE, Comparisons

from pagoda.worker.model_store import ModelStore

COMPARISONS = pytest.StashKey[Comparisons]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPARISONS] = Comparisons()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    done = config.stash[COMPARISONS]
    if done.num_tokens:
        gaps = f": {', '.join(done.near_ties)}" if done.near_ties else ""
        terminalreporter.write_line(
            f"{done.num_tokens} tokens compared with transformers, {len(done.near_ties)} near-ties "
            f"(logits less than {NEAR_TIE} apart){gaps}"
        )


@pytest.fixture(scope="session")
def comparisons(pytestconfig: pytest.Config) -> Comparisons:
    return pytestconfig.stash[COMPARISONS]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched once for this machine."""
    return ModelStore(Path.home() / ".cache" / "pagoda" / "models").fetch("smollm2-135m", progress=lambda *_: None)
