"""What Ray and Serve are told before they start."""

from pathlib import Path

from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.ray_environment import ray_environment
from pagoda.worker.config import EngineConfig


def test_no_port_is_one_that_clients_are_given(tmp_path: Path) -> None:
    """Scenario: HAProxy did not start, because a connection had been given its port in the seconds before.

    The system gives clients' connections ports of its own choice, and what one of them has nobody can listen on.
    """
    config = ClusterConfig(EngineConfig(tmp_path), "m", num_ingresses=2)
    environment = ray_environment(config, tmp_path)
    ports = {name: int(value) for name, value in environment.items() if name.endswith("_PORT")}
    assert len(set(ports.values())) == len(ports) == 8
    assert all(20_000 <= port < 30_000 for port in ports.values()), ports
