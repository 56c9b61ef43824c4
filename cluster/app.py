"""Ray and Ray Serve: deploys the workers and the ingress, and takes them down again.

Two applications: *workers* (the engines) and *front* (the HTTP ingress, which finds the workers by name), so that
either can be updated without redeploying the other.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import RunTarget
from ray.serve._private.haproxy import get_haproxy_binary
from ray.serve.config import HTTPOptions, RequestRouterConfig, gRPCOptions
from ray.serve.schema import LoggingConfig

from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.directory_actor import ActorAddress, name_directories, start_directories, stop_directories
from pagoda.cluster.front import Front
from pagoda.cluster.ingress.live_requests import ABORT_GRACE_S
from pagoda.cluster.local_cluster import LocalCluster
from pagoda.cluster.ray_environment import LONGEST_STREAM_S, max_connections, ray_environment
from pagoda.cluster.replica import Worker, WorkersRoot
from pagoda.cluster.router import ROUTER_OPTIONS
from pagoda.cluster.tensor_parallel import RayRanks
from pagoda.cluster.tls_front import TlsFront, TlsListener
from pagoda.worker.cluster_tls import ClusterTls, make_cluster_tls
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import ConfigError, PagodaError

WORKERS_APP = "workers"
FRONT_APP = "front"
_ANSWER_DEADLINE_S = 10.0
_HEALTH_PERIOD_S = 1.0
_POLL_S = 0.1
_WAIT_S = 0.5
_PROXY_ACTORS = "SERVE_PROXY_ACTOR"
"""What the names of Serve's proxy actors begin with."""
_DELETION_S = 3.0
"""Serve takes about one second to take down what is idle."""
_GRPC_SERVICES = [
    "pagoda.cluster.ingress.grpc_services.add_inference",
    "pagoda.cluster.ingress.grpc_services.add_health",
]
_LIVING = ("NOT_STARTED", "RUNNING", "DEPLOYING", "UNHEALTHY")

# Threads that wait for each other yield their core, which on a CPU machine the ingress needs.
_WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
# The ingress does nothing that blocks, so its loop may serve requests, routing and Serve's own calls alike.
_FRONT_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
# What all deployments have in common; Serve's own defaults differ between versions.
_LIFECYCLE: dict[str, Any] = {
    "health_check_period_s": _HEALTH_PERIOD_S,
    "health_check_timeout_s": _ANSWER_DEADLINE_S,
    "graceful_shutdown_wait_loop_s": 0.2,
    "max_constructor_retry_count": 1,
}
_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)

logger = logging.getLogger(__name__)


class ServiceFailedError(PagodaError):
    """The service did not come up, or went down and does not come back."""


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes, deaf to signals."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), _ANSWER_DEADLINE_S).close()
        except OSError as error:
            raise ConfigError("ray_address", f"{address} does not answer: {error}") from error


def start_ray(config: ClusterConfig, *, address: str | None, scratch: Path) -> None:
    """Join the Ray cluster at `address`, or start one on this machine that ends with this process.

    `scratch` is a folder for HAProxy's files, there until the service has ended.
    """
    os.environ.update(ray_environment(config, scratch))
    # Warnings are in the log files; who asks for more than these wants to see it.
    shows_logs = config.log_level in ("debug", "info")
    if address is not None:
        _check_reachable(address)
        ray.init(address, log_to_driver=shows_logs, logging_level=logging.ERROR)
        return
    # Workers reserve one CPU for each of their ranks, the ingress and Serve's own actors none. There is room for one
    # more, so that a worker is replaced before it stops.
    ray.init(
        "local",  # whatever RAY_ADDRESS says
        num_cpus=max((config.num_workers + 1) * config.engine.tensor_parallel_size, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=shows_logs,
        logging_level=logging.ERROR,
    )
    _end_helpers(shows_logs)


def _end_helpers(shows_logs: bool) -> None:
    """End those of Ray's processes that do nothing here: dashboard, scaling of the cluster, forwarding of logs."""
    node: Any = ray._private.worker._global_node  # there is no option: `ray.init` always starts them
    node.kill_dashboard(check_alive=False)
    node.kill_monitor(check_alive=False)
    if not shows_logs:
        node.kill_log_monitor(check_alive=False)


def start_serve(config: ClusterConfig) -> None:
    """Bring Serve up with its proxy, which listens where users come. Raises RuntimeError if the proxy does not."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        http_options=HTTPOptions(host=config.host, port=config.port, request_timeout_s=None),
        grpc_options=gRPCOptions(
            port=config.grpc_port,
            grpc_servicer_functions=_GRPC_SERVICES if config.grpc_port else [],
            enable_reflection=True,
        ),
        logging_config=_LOGGING,
    )


def deploy(config: ClusterConfig, limits: EngineLimits) -> Callable[[], None]:
    """Start to bring the service up; `is_up` says when it answers. `limits` are those of the engine config.

    Calling what is returned starts to replace all workers and ingresses, one after the other: first comes the new one,
    then the old one finishes what it has, where there is room for one more.
    """
    token = secrets.token_hex()
    tls = make_cluster_tls() if config.inner_tls else None
    directories = name_directories(config.num_directories)

    def run() -> None:
        workers, front = _workers(config, token, directories, tls), _front(config, limits, token, directories, tls)
        serve.run_many(
            [
                RunTarget(workers, name=WORKERS_APP, route_prefix=None, logging_config=_LOGGING),
                RunTarget(front, name=FRONT_APP, route_prefix="/", logging_config=_LOGGING),
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    _router_class(config)  # complains before anything is started
    start_directories(directories, token, config.log_level, tls)
    run()
    return run


def is_up() -> bool:
    """Whether both applications serve. Serve mends what can be mended by itself.

    Raises `ServiceFailedError` once one of them has failed for good.
    """
    applications = serve.status().applications
    statuses = []
    for name in (WORKERS_APP, FRONT_APP):
        if (application := applications.get(name)) is None:
            raise ServiceFailedError(f"{name}: the application is gone")
        if application.status not in _LIVING:
            messages = [application.message, *(d.message for d in application.deployments.values())]
            reasons = " ".join(message.strip().splitlines()[-1] for message in messages if message.strip())
            raise ServiceFailedError(f"{name}: {application.status}: {reasons}; see the logs in /tmp/ray")
        statuses.append(application.status)
    return all(status == "RUNNING" for status in statuses)


def watch_local_cluster(config: ClusterConfig, scratch: Path, on_ray_dead: Callable[[], None]) -> LocalCluster:
    """Watch over the cluster that `start_ray` has started here."""
    host = "127.0.0.1" if config.host == "0.0.0.0" else config.host
    return LocalCluster(
        ray_address=ray.get_runtime_context().gcs_address,
        scratch=scratch,
        proxy_address=f"{host}:{config.port}",
        replace_proxy=_kill_proxy_managers,
        on_ray_dead=on_ray_dead,
    )


def tls_front(config: ClusterConfig, inner: ClusterConfig, scratch: Path) -> TlsFront:
    """What takes TLS where `config` says and passes it on to `inner`; nothing if nobody asks for it."""
    if config.tls is None:
        return TlsFront("", scratch, None, [], max_connections=0)
    listeners = [TlsListener("http", f"{config.host}:{config.port}", "http/1.1", inner.port)]
    if config.grpc_port:
        listeners.append(TlsListener("grpc", f"{config.host}:{config.grpc_port}", "h2", inner.grpc_port))
    return TlsFront(get_haproxy_binary(), scratch, config.tls, listeners, max_connections=max_connections(config))


def _kill_proxy_managers() -> None:
    """Serve starts others, with proxies of their own."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if name.startswith(_PROXY_ACTORS) and "fallback" not in name:
            ray.kill(ray.get_actor(**actor))


def shut_down(*, drain_s: float, hurry: threading.Event, cluster: LocalCluster | None) -> None:
    """Take the service down: running requests get `drain_s`, or until `hurry`, then everything of ours is gone.

    That includes the Ray cluster if `start_ray` started it, which `cluster` then watches; else only our applications
    go.
    """
    try:
        _drain(drain_s, hurry)
    except Exception as error:  # noqa: BLE001  (whatever it is, it must not keep us from stopping)
        logger.warning("running requests were not waited for: %s", error)
    if cluster is not None:
        cluster.stop_listening()  # who comes now is not answered, instead of with Serve's 404
    for name in _running_apps():
        serve.delete(name, _blocking=False)
    stop_directories()
    # Idle by now, but for clients that read or write a byte a second: Serve would wait for these.
    deadline = time.monotonic() + _DELETION_S
    while _running_apps() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if cluster is not None:
        cluster.close()
    # Not before it `serve.shutdown()`: Ray ends Serve's processes too, and does not print how the controller died.
    ray.shutdown()


def _is_front_running() -> bool:
    front = serve.status().applications.get(FRONT_APP)
    deployments = front.deployments.values() if front is not None else ()
    return any(state == "RUNNING" and count for d in deployments for state, count in d.replica_states.items())


def _running_apps() -> set[str]:
    return {FRONT_APP, WORKERS_APP} & serve.status().applications.keys()


def _drain(drain_s: float, hurry: threading.Event) -> None:
    """Tell all ingress processes to finish, and at `hurry` to abort what still runs; return when they have."""
    if not _is_front_running():
        return
    front = serve.get_app_handle(FRONT_APP)
    try:
        _drain_ingresses(front, drain_s, hurry)
    finally:
        # It reports to the controller for as long as it lives.
        front.shutdown()  # type: ignore[no-untyped-call]


def _drain_ingresses(front: Any, drain_s: float, hurry: threading.Event) -> None:
    is_hurried = hurry.is_set()
    answers = front.broadcast("drain", 0.0 if is_hurried else drain_s)
    deadline = time.monotonic() + drain_s + ABORT_GRACE_S + _ANSWER_DEADLINE_S
    while time.monotonic() < deadline:
        # In short waits: each is done by threads, for which a process that is interrupted waits before it exits.
        try:
            outcomes = answers.results(timeout_s=_WAIT_S, return_exceptions=True)
        except TimeoutError:
            if hurry.is_set() and not is_hurried:
                is_hurried = True
                answers = front.broadcast("drain", 0.0)
            continue
        if not any(isinstance(outcome, TimeoutError) for outcome in outcomes):
            return
    raise TimeoutError("no answer from an ingress")


def _workers(config: ClusterConfig, token: str, directories: list[ActorAddress], tls: ClusterTls | None) -> Any:
    scheduler = config.engine.scheduler
    num_gpus = 1 if config.engine.device.startswith("cuda") else 0
    worker = serve.deployment(
        num_replicas=config.num_workers,
        ray_actor_options={
            "num_cpus": 1,
            "num_gpus": num_gpus,
            "runtime_env": {"env_vars": _WORKER_ENVIRONMENT},
        },
        **_placement(config.engine.tensor_parallel_size, num_gpus),
        # Room for one more than the engine takes, so that the engine is what refuses, and says who has to go.
        max_ongoing_requests=scheduler.max_num_seqs + 2 * scheduler.max_num_waiting + 1,
        # In all: what waits at the routers is what no worker has room for yet.
        max_queued_requests=config.num_workers * (scheduler.max_num_seqs + scheduler.max_num_waiting),
        request_router_config=RequestRouterConfig(**ROUTER_OPTIONS | _router_class(config)),
        # What still runs on a replica that stops goes on at another one.
        graceful_shutdown_timeout_s=config.drain_s,
        max_surge_percent=_surge_percent(config, num_gpus),
        **_LIFECYCLE,
    )
    # Nobody calls the root, so it has no process.
    root = serve.deployment(autoscaling_config={"initial_replicas": 0, "min_replicas": 0, "max_replicas": 1})
    return root(WorkersRoot).bind(
        worker(Worker).bind(
            config.engine,
            config.served_model_name,
            token,
            ray.util.get_node_ip_address,
            directories,
            config.log_level,
            partial(RayRanks, environment=_WORKER_ENVIRONMENT, num_gpus=num_gpus, log_level=config.log_level),
            tls,
        )
    )


def _surge_percent(config: ClusterConfig, num_gpus: int) -> int:
    """Where a worker is replaced: one more at a time, if the cluster has room for it; else one less."""
    needed = config.engine.tensor_parallel_size
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    has_room = free.get("GPU" if num_gpus else "CPU", 0.0) >= needed
    return 1 if has_room or not _running_apps() else 0  # Serve rounds up


def _placement(num_ranks: int, num_gpus: int) -> dict[str, Any]:
    """Room for all ranks of a replica, given at once or not at all; on one node if one has it. The first is its own."""
    if num_ranks == 1:
        return {}
    bundle = {"CPU": 1, "GPU": num_gpus} if num_gpus else {"CPU": 1}
    return {"placement_group_bundles": [bundle] * num_ranks, "placement_group_strategy": "PACK"}


def _front(
    config: ClusterConfig,
    limits: EngineLimits,
    token: str,
    directories: list[ActorAddress],
    tls: ClusterTls | None,
) -> Any:
    front = serve.deployment(
        name="Front",
        num_replicas=config.num_ingresses,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _FRONT_ENVIRONMENT}},
        max_ongoing_requests=config.max_http_requests,
        max_queued_requests=-1,
        # An ingress that is replaced ends with its last stream. When the service stops it is drained before.
        graceful_shutdown_timeout_s=LONGEST_STREAM_S,
        max_surge_percent=100,
        **_LIFECYCLE,
    )
    return front(serve.ingress()(Front)).bind(config, limits, token, WORKERS_APP, directories, tls)


def _router_class(config: ClusterConfig) -> dict[str, Any]:
    """Somebody else's, if it is asked for. Raises `ConfigError`."""
    if config.router is None:
        return {}
    module, _, name = config.router.partition(":")
    try:
        return {"request_router_class": getattr(import_module(module), name)}
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError("router", str(error)) from error
