"""Every flag of Ray and Ray Serve that we depend on, as environment variables, which is how most of them are set."""

import os
import resource
from pathlib import Path

from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES
from pagoda.cluster.listening import free_ports

LONGEST_STREAM_S = 24 * 3600
"""After which a proxy or an ingress that is replaced ends, whoever still reads."""
_CLIENT_TIMEOUT_S = 60
_MORE_INGRESSES = 300


def ray_environment(config: ClusterConfig, scratch: Path) -> dict[str, str]:
    """Every Ray and Serve flag that we depend on, set explicitly; `scratch` is a folder for HAProxy's files."""
    # Serve gives a port away again only after a day, so this is for so many ingresses in one.
    num_ports = 2 * config.num_ingresses + _MORE_INGRESSES
    metrics_port = free_ports(4 + 2 * num_ports)
    stats_port, fallback_port, fallback_grpc_port, first_http_port = range(metrics_port + 1, metrics_port + 5)
    first_grpc_port = first_http_port + num_ports
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would run its processes, the model among them, behind everybody else's.
        "RAY_worker_niceness": "0",
        # An idle Serve at its defaults takes an eighth of a core, which a CPU machine's model needs.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
        # The same of an idle Ray: nobody looks at its states, and memory and resources do not change that fast.
        "RAY_enable_metrics_collection": "0",
        "RAY_event_stats": "0",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_memory_monitor_refresh_ms": "1000",
        "RAY_raylet_report_resources_period_milliseconds": "1000",
        # How soon a proxy that died is replaced.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # HAProxy instead of Serve's Python proxy: a fifth of its CPU time for each token.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, (os.cpu_count() or 1) // 2))),
        # Whoever sends half a request, or does not read, is let go.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_CLIENT_TIMEOUT_S),
        "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections(config)),
        # It does not see a client hang up whose body it splices. Serve cannot turn that off: the lines follow this one.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure\n    no option splice-request\n    no option splice-response",
        # An old HAProxy knows only old ingresses. Where all of these are gone, it takes so many tries, within seconds,
        # until their health checks have failed and it turns to Serve's own proxy.
        "RAY_SERVE_HAPROXY_RETRIES": "20",
        # Serve would take 2 GiB from anybody, and hold and parse it before it is asked whether it wants to.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max(config.max_body_bytes, MAX_BODY_BYTES)),
        # Its own pages listen on all interfaces; on fixed ports two services on one machine would collide.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        # Serve's gRPC servers share a port with whoever listens there already, and answer for each other.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first_grpc_port + num_ports - 1),
        # Another service's ingress must not come where this one's proxies still look for one that is gone.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_http_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_http_port + num_ports - 1),
        # An idle ingress stops at once; a busy one gets the drain time.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        # Whenever an ingress comes or goes, a new HAProxy takes over, and the old one ends with its last stream.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
    }


def max_connections(config: ClusterConfig) -> int:
    """Of HAProxy, which takes more than two file descriptors for each and does not start without them."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(config.max_http_requests * config.num_ingresses + 64, descriptors // 4)
