"""What the watch over a local cluster does when Ray or the proxy dies; both are plain listeners here."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_server, socket

import pytest

from pagoda.cluster import local_cluster
from pagoda.cluster.local_cluster import LocalCluster

DEADLINE_S = 20.0


def address_of(listener: socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


class Watched:
    """A cluster of two listeners, and what its watch has done."""

    def __init__(self, scratch: Path) -> None:
        self.ray, self.proxy = create_server(("127.0.0.1", 0)), create_server(("127.0.0.1", 0))
        self.scratch = scratch
        self.replaced, self.ray_died = threading.Event(), threading.Event()
        self.watch = LocalCluster(
            ray_address=address_of(self.ray),
            scratch=scratch,
            proxy_address=address_of(self.proxy),
            replace_proxy=self.replaced.set,
            on_ray_dead=self.ray_died.set,
        )


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(local_cluster, "_LOOK_PERIOD_S", 0.01)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    watched = Watched(scratch)
    yield watched
    watched.watch.close()
    watched.ray.close()
    watched.proxy.close()


@pytest.fixture
def proxy(watched: Watched) -> Iterator[subprocess.Popen[bytes]]:
    """Looks like a HAProxy of this cluster."""
    script = watched.scratch / "haproxy.py"
    script.write_text("import signal; signal.pause()")
    with subprocess.Popen([sys.executable, script]) as process:
        # A child may run before its command line can be read.
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)
        yield process
        process.kill()


def test_proxy_that_dies_is_replaced(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.watch.watch_proxy()
    watched.proxy.close()
    assert watched.replaced.wait(DEADLINE_S)
    assert "nobody listens" in caplog.text
    assert not watched.ray_died.is_set()


def test_proxy_need_not_listen_while_the_service_comes_or_goes(watched: Watched) -> None:
    watched.proxy.close()
    assert not watched.replaced.wait(0.3)
    watched.watch.watch_proxy()
    watched.watch.stop_listening()
    watched.replaced.clear()  # the two lines above may have taken long
    assert not watched.replaced.wait(0.3)


def test_ray_that_dies_leaves_nothing(watched: Watched, proxy: subprocess.Popen[bytes]) -> None:
    watched.ray.close()
    assert watched.ray_died.wait(DEADLINE_S)
    assert proxy.wait(DEADLINE_S) < 0
    assert not watched.scratch.exists()


def test_proxies_stop_listening(watched: Watched, proxy: subprocess.Popen[bytes]) -> None:
    """By the signal that lets them finish; Python ends of it."""
    watched.watch.stop_listening()
    assert proxy.wait(DEADLINE_S) < 0
    assert watched.scratch.exists()


def test_closed_watch_sees_nothing(watched: Watched) -> None:
    """When the service itself takes Ray down."""
    watched.watch.close()
    watched.ray.close()
    assert not watched.ray_died.wait(0.3)
