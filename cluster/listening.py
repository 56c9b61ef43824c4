"""Where a service may listen, asked before it is started."""

import random
import socket

from pagoda.worker.errors import ConfigError

HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
"""This machine only, or all its IPv4 addresses. With any other, IPv6 too, Ray Serve's HAProxy would listen where it is
told and look for the ingress at 127.0.0.1, where it is not then: every request would end with status 500."""


def problem_with_listening(host: str, port: int) -> str | None:
    """Why nobody can listen there right now, if so. Ray Serve itself would say so only after a minute."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


_INNER_PORTS = range(20_000, 30_000)
"""Above those that Ray gives to its workers, below those that the system gives to clients."""
_MAX_TRIES = 100


def free_ports(count: int) -> int:
    """The first of `count` ports in a row on which nobody listens, at a random place. Raises `ConfigError`."""
    for _ in range(_MAX_TRIES):
        first = random.randrange(_INNER_PORTS.start, _INNER_PORTS.stop - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise ConfigError("num_ingresses", f"there are no {count} free ports in a row for them")
