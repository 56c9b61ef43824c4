"""Ports for ourselves, beside servers that would share theirs."""

import socket

import pytest

from pagoda.cluster import listening
from pagoda.worker.errors import ConfigError


def test_a_port_that_its_owner_would_share_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: two services on one machine. gRPC's servers share ports, and clients got the other one's answers."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first = listening.free_ports(4)
        other.bind(("", first + 2))
        other.listen()
        monkeypatch.setattr(listening, "_INNER_PORTS", range(first, first + 5))
        with pytest.raises(ConfigError, match="num_ingresses"):
            listening.free_ports(4)
        assert listening.free_ports(1) != first + 2
    assert listening.free_ports(4) == first
