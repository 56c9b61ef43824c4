"""A Ray cluster that `pagoda serve` has started on this machine: what nobody else does when part of it dies."""

import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = 1.0
_CONNECT_LIMIT_S = 2.0
_MAX_REFUSALS = 3
"""In a row, before a listener counts as dead."""
_MEND_PERIOD_S = 30.0
"""How long a proxy that was replaced has to come up."""


class LocalCluster:
    """Looks every second, on a thread of its own, whether Ray and the proxy are there."""

    def __init__(
        self,
        *,
        ray_address: str,
        scratch: Path,
        proxy_address: str,
        replace_proxy: Callable[[], None],
        on_ray_dead: Callable[[], None],
    ) -> None:
        """Addresses are `host:port`, the first Ray's own. `scratch` is the folder of HAProxy's files.

        `replace_proxy` is called when nobody listens at `proxy_address` any more. When Ray is dead, which a signal to
        all processes of the service brings about, the proxies are killed, `scratch` is removed, and `on_ray_dead` is
        called.
        """
        self._ray_address = ray_address
        self._scratch = scratch
        self._proxy_address = proxy_address
        self._replace_proxy = replace_proxy
        self._on_ray_dead = on_ray_dead
        self._is_up = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="local-cluster", daemon=True)
        self._thread.start()

    def watch_proxy(self) -> None:
        """The service is up: from now on its proxy must listen."""
        self._is_up = True

    def stop_listening(self) -> None:
        """The proxies take no new connection and end with their last one."""
        self._is_up = False
        self._signal_proxies(signal.SIGUSR1)

    def close(self) -> None:
        """Watch no longer. To be called before Ray is shut down."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        num_ray_refusals = num_proxy_refusals = 0
        pause_s = 0.0
        while not self._ended.wait(_LOOK_PERIOD_S):
            num_ray_refusals = 0 if _is_listening(self._ray_address) else num_ray_refusals + 1
            if num_ray_refusals >= _MAX_REFUSALS:
                self._signal_proxies(signal.SIGKILL)
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._on_ray_dead()
                return
            pause_s = max(0.0, pause_s - _LOOK_PERIOD_S)
            if not self._is_up or pause_s:
                continue
            num_proxy_refusals = 0 if _is_listening(self._proxy_address) else num_proxy_refusals + 1
            if num_proxy_refusals >= _MAX_REFUSALS:
                num_proxy_refusals, pause_s = 0, _MEND_PERIOD_S
                logger.warning("nobody listens at %s any more: replacing the proxy", self._proxy_address)
                try:
                    self._replace_proxy()
                except Exception as error:  # noqa: BLE001  (it is tried again)
                    logger.warning("the proxy was not replaced: %s", error)

    def _signal_proxies(self, signal_number: int) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                command = (folder / "cmdline").read_bytes()
                if os.fsencode(self._scratch) in command and b"haproxy" in command:
                    os.kill(int(folder.name), signal_number)


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_LIMIT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # busy, or it says nothing about the listener
    return True
