"""What a running service is told by signals."""

import signal
import threading


class ServiceSignals:
    """Handlers for SIGINT, SIGTERM and SIGUSR2. `wait` is for the main thread."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()
        """The service shall stop: take no more, and let what runs end."""
        self.hurry = threading.Event()
        """Told twice: it shall abort what runs."""
        self._replace = threading.Event()
        self._attention = threading.Event()

    def take(self) -> None:
        """Install the handlers. A third signal to stop raises `KeyboardInterrupt`: then nothing is waited for."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR2, self._on_replace)

    def wait(self, timeout_s: float) -> None:
        """Until a signal comes, or for `timeout_s`."""
        self._attention.wait(timeout_s)
        self._attention.clear()

    def is_replacing(self) -> bool:
        """Whether SIGUSR2 has come since this was last asked: all processes of the service shall be replaced."""
        is_set = self._replace.is_set()
        self._replace.clear()
        return is_set

    def _on_stop(self, *_: object) -> None:
        if self.hurry.is_set():
            raise KeyboardInterrupt
        if self.interrupted.is_set():
            self.hurry.set()
        self.interrupted.set()
        self._attention.set()

    def _on_replace(self, *_: object) -> None:
        self._replace.set()
        self._attention.set()
