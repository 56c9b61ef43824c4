"""What `pagoda serve` does and says while the service runs."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.cluster.commands.serve import _watch
from pagoda.cluster.commands.service_signals import ServiceSignals
from pagoda.cluster.config import ClusterConfig
from pagoda.worker.config import EngineConfig


class Script(ServiceSignals):
    """Instead of waiting, does one thing after the other; then the service is interrupted."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        super().__init__()
        self._actions = iter(actions)

    def wait(self, timeout_s: float) -> None:  # noqa: ARG002  (nothing takes time here)
        action: Callable[[], object] = next(self._actions, self.interrupted.set)
        action()


def said(script: Script, *, tenants_path: Path | None = None, up: Iterator[bool] | None = None) -> list[str]:
    lines: list[str] = []
    config = ClusterConfig(EngineConfig(Path("model")), "model", tenants_path=tenants_path)
    is_up: Any = (lambda: True) if up is None else up.__next__
    _watch(config, script, lambda: lines.append("replace"), is_up, lines.append)
    return lines


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_broken_file_of_tenants_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: []")
    script = Script(
        lambda: path.write_text("tenants: ["), lambda: None, lambda: path.write_text("tenants: []"), lambda: None
    )
    first, second = said(script, tenants_path=path)
    assert first.startswith("the tenants stay as they were: ")
    assert second == "the tenants' file is good again"


@pytest.mark.usefixtures("handlers")
def test_all_is_replaced_when_a_signal_says_so() -> None:
    script = Script(lambda: os.kill(os.getpid(), signal.SIGUSR2), lambda: None, lambda: None)
    script.take()
    lines = said(script, up=iter([True, False, True, True]))
    assert lines == [
        "replacing all workers and ingresses, one after the other",
        "replace",
        "all workers and ingresses are replaced",
    ]


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_stops_and_the_second_hurries() -> None:
    signals = ServiceSignals()
    signals.take()
    os.kill(os.getpid(), signal.SIGTERM)
    signals.wait(10.0)
    assert (signals.interrupted.is_set(), signals.hurry.is_set()) == (True, False)
    os.kill(os.getpid(), signal.SIGINT)
    signals.wait(10.0)
    assert signals.hurry.is_set()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
