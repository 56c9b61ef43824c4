"""What `pagoda serve` is told, as one object."""

import re
from dataclasses import dataclass
from pathlib import Path

from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES
from pagoda.cluster.listening import HOSTS
from pagoda.cluster.logs import LOG_LEVELS, LogLevel
from pagoda.cluster.tls_front import TlsFiles
from pagoda.worker.config import EngineConfig, require_in_range
from pagoda.worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A service: N workers of one model behind one HTTP address."""

    engine: EngineConfig
    """Every worker's."""
    served_model_name: str
    """What clients put into `model`."""
    host: str = "127.0.0.1"
    """One of `HOSTS`."""
    port: int = 8000
    grpc_port: int = 0
    """0 leaves gRPC out."""
    tenants_path: Path | None = None
    """The file that says whose keys are taken; None takes everybody. On several machines, each has it there."""
    tls: TlsFiles | None = None
    """For HTTP and gRPC; None serves both in the clear."""
    inner_tls: bool = True
    """Whether workers, ingresses and directories talk to each other by TLS."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Largest HTTP request body."""
    num_workers: int = 1
    num_ingresses: int = 1
    """HTTP processes."""
    router: str | None = None
    """module:Class of a Ray Serve request router to use instead of ours."""
    num_directories: int = 1
    """Prefix directories, which say where requests go; without any they go by load alone."""
    drain_s: float = 10.0
    """How long running requests may go on when the service stops."""
    request_timeout_s: float = 3600.0
    """The most that a request may take, and what one may that asks for no less."""
    max_http_requests: int = 4096
    """HTTP requests that the ingress works on at once; more wait in the proxy."""
    log_level: LogLevel = "warning"
    """Of workers and ingresses. At info, the ingress logs a line for each request."""

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ConfigError("served_model_name", "must not be empty")
        if self.host not in HOSTS:
            raise ConfigError("host", f"must be one of {', '.join(HOSTS)}, got {self.host!r}")
        require_in_range("port", self.port, 1, 65535)
        require_in_range("grpc_port", self.grpc_port, 0, 65535)
        if self.grpc_port == self.port:
            raise ConfigError("grpc_port", f"{self.grpc_port} is the HTTP port already")
        require_in_range("max_body_bytes", self.max_body_bytes, 1, 2**40)
        require_in_range("num_workers", self.num_workers, 1, 1024)
        require_in_range("num_ingresses", self.num_ingresses, 1, 1024)
        if self.router is not None and not re.fullmatch(r"[\w.]+:\w+", self.router):
            raise ConfigError("router", f"must be module:Class, got {self.router!r}")
        require_in_range("num_directories", self.num_directories, 0, 8)
        require_in_range("drain_s", self.drain_s, 0, 3600)
        require_in_range("request_timeout_s", self.request_timeout_s, 0.001, 7 * 24 * 3600)
        require_in_range("max_http_requests", self.max_http_requests, 1, 2**20)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError("log_level", f"must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")
