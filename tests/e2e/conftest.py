"""A count of near-ties at the end of the run. As it lies here, tests can import `oracle`."""

import pytest
from oracle import NEAR_TIE, Comparisons

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
