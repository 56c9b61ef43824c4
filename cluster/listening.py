"""Where a service may listen, asked before it is started."""

import socket

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
