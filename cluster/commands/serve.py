"""`pagoda serve`: the whole service on this machine, or on a Ray cluster that runs already."""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from pagoda.cluster.commands.config_file import config_options, dump_config
from pagoda.cluster.commands.options import engine_config, engine_options, engine_settings, share_cores
from pagoda.cluster.commands.service_signals import ServiceSignals
from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES
from pagoda.cluster.listening import free_ports, problem_with_listening
from pagoda.cluster.logs import LOG_LEVELS, LogLevel
from pagoda.cluster.tenants_file import read_tenants_file
from pagoda.cluster.tls_front import TlsFiles
from pagoda.worker.config import EngineLimits, require_in_range
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.errors import ConfigError

_CHECK_PERIOD_S = 15.0
_START_CHECK_PERIOD_S = 0.1
_REPLACED_CHECK_PERIOD_S = 1.0


@click.command()
@config_options
@engine_options
@click.option("--served-model-name", help="What clients put into `model`.  [default: the model's name]")
@click.option("--host", default="127.0.0.1", help="Address to listen on: 127.0.0.1, or 0.0.0.0 for all of IPv4.")
@click.option("--port", type=int, default=8000, help="HTTP port.")
@click.option("--grpc-port", type=int, default=9000, help="gRPC port; 0 serves no gRPC.")
@click.option(
    "--tenants",
    "tenants_path",
    type=click.Path(path_type=Path),
    help="YAML file of tenants and their keys, read again when it changes.  [default: no keys are asked for]",
)
@click.option("--tls-cert", type=click.Path(path_type=Path), help="PEM file: serve HTTP and gRPC by TLS, with this.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM file of its key.")
@click.option(
    "--tls-client-ca", type=click.Path(path_type=Path), help="PEM file: clients must show certificates of it."
)
@click.option("--inner-tls/--no-inner-tls", default=True, help="Between the processes of the service.")
@click.option("--max-body-mib", type=float, default=MAX_BODY_BYTES / 2**20, help="Largest HTTP request body, MiB.")
@click.option("--workers", "num_workers", type=int, default=1, help="Worker replicas.")
@click.option("--ingresses", "num_ingresses", type=int, default=1, help="HTTP processes.")
@click.option("--router", metavar="MODULE:CLASS", help="Ray Serve request router to use instead of ours.")
@click.option("--directories", "num_directories", type=int, default=1, help="Prefix directories; 0 places by load.")
@click.option("--request-timeout-s", type=float, default=3600.0, help="Most seconds that a request may take.")
@click.option("--drain-s", type=float, default=10.0, help="Seconds that running requests get when the service stops.")
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    help="Of workers and ingresses; info logs a line for each request.  [default: warning; info after pagoda -v]",
)
@click.option("--ray-address", help="A running Ray cluster to serve on, such as `auto`.  [default: start one here]")
def serve(
    served_model_name: str | None,
    host: str,
    port: int,
    grpc_port: int,
    tenants_path: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    inner_tls: bool,
    max_body_mib: float,
    num_workers: int,
    num_ingresses: int,
    num_directories: int,
    router: str | None,
    request_timeout_s: float,
    drain_s: float,
    log_level: LogLevel | None,
    ray_address: str | None,
    print_config: bool,
    **options: Any,
) -> None:
    """Serve a model through the OpenAI API until interrupted."""
    begin = time.monotonic()
    is_verbose = click.get_current_context().find_root().params.get("verbose", False)
    name = served_model_name if served_model_name is not None else options["model"].rstrip("/").rsplit("/", 1)[-1]
    share_cores(options, num_workers=num_workers)
    require_in_range("max_body_mib", max_body_mib, 2**-20, 2**20)
    config = ClusterConfig(  # complains before anything is fetched
        engine=engine_settings(options),
        served_model_name=name,
        host=host,
        port=port,
        grpc_port=grpc_port,
        tenants_path=None if tenants_path is None else tenants_path.absolute(),
        tls=_tls_files(tls_cert, tls_key, tls_client_ca),
        inner_tls=inner_tls,
        max_body_bytes=int(max_body_mib * 2**20),
        num_workers=num_workers,
        num_ingresses=num_ingresses,
        num_directories=num_directories,
        router=router,
        request_timeout_s=request_timeout_s,
        drain_s=drain_s,
        log_level=log_level or ("info" if is_verbose else "warning"),
    )
    if config.tenants_path is not None:
        read_tenants_file(config.tenants_path)
    if print_config:
        click.echo(dump_config(click.get_current_context()), nl=False)
        return
    config = replace(config, engine=engine_config(options))
    num_ranks = num_workers * config.engine.tensor_parallel_size
    plan = plan_engine(config.engine, num_ranks_here=num_ranks if ray_address is None else 1)
    config = replace(config, engine=replace(config.engine, device=str(plan.device)))
    _check_ports(config)
    _run(config, plan.limits, ray_address, begin)


def _tls_files(certificate: Path | None, key: Path | None, client_authority: Path | None) -> TlsFiles | None:
    """Raises `ConfigError`."""
    if certificate is None or key is None:
        for name, path in (("tls_key", key), ("tls_client_ca", client_authority), ("tls_cert", certificate)):
            if path is not None:
                raise ConfigError(name, "--tls-cert and --tls-key go together")
        return None
    files = TlsFiles(
        certificate.absolute(), key.absolute(), None if client_authority is None else client_authority.absolute()
    )
    files.check()
    return files


def _run(config: ClusterConfig, limits: EngineLimits, ray_address: str | None, begin: float) -> None:
    """Bring the service up and keep it until a signal comes. The first signal lets running requests end.

    SIGUSR2 has all workers and ingresses replaced.
    """
    signals = ServiceSignals()
    if ray_address is None:
        signals.take()  # a Ray that is half started must be taken down; one that is not ours may be left at once

    def say(what: str) -> None:
        click.echo(f"[{time.monotonic() - begin:5.1f} s] {what}", err=True)

    def on_ray_dead() -> None:
        """From another thread, while this one may be waiting for Ray for a minute."""
        say("Ray has ended, and the service with it; running requests were cut")
        os._exit(1)

    say(f"starting Ray{'' if ray_address is None else f' on {ray_address}'}")
    os.environ.update(_read_at_import(starts_ray=ray_address is None))
    # It takes seconds to import.
    from pagoda.cluster.app import deploy, is_up, shut_down, start_ray, start_serve, tls_front, watch_local_cluster

    inner = _behind_tls(config)
    with TemporaryDirectory(prefix="pagoda-", ignore_cleanup_errors=True) as scratch:
        start_ray(inner, address=ray_address, scratch=Path(scratch))
        signals.take()  # Ray has put its own handlers in their place, which abort
        cluster = watch_local_cluster(inner, Path(scratch), on_ray_dead) if ray_address is None else None
        front = tls_front(config, inner, Path(scratch))
        try:
            say(_loading(config))
            try:
                start_serve(inner)
            except RuntimeError:  # which does not say why
                _check_ports(inner)
                raise
            replace_replicas = deploy(inner, limits)
            while not signals.interrupted.is_set() and not is_up():
                signals.wait(_START_CHECK_PERIOD_S)
            if not signals.interrupted.is_set():
                front.start()
                say(_served(config))
                if cluster is not None:
                    cluster.watch_proxy()
            _watch(config, signals, replace_replicas, is_up, say)
        finally:
            say("stopping")
            shut_down(drain_s=config.drain_s, hurry=signals.hurry, cluster=cluster)
            front.close()


def _watch(
    config: ClusterConfig,
    signals: ServiceSignals,
    replace_replicas: Callable[[], None],
    is_up: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Until it is interrupted. Raises what `is_up` raises."""
    was_up, problem = True, None
    while not signals.interrupted.is_set():
        if signals.is_replacing():
            say("replacing all workers and ingresses, one after the other")
            replace_replicas()
            was_up = False
        elif is_up() and not was_up:
            say("all workers and ingresses are replaced")
            was_up = True
        before, problem = problem, _problem_with_tenants(config.tenants_path)
        if problem != before:
            say("the tenants' file is good again" if problem is None else f"the tenants stay as they were: {problem}")
        signals.wait(_CHECK_PERIOD_S if was_up else _REPLACED_CHECK_PERIOD_S)


def _read_at_import(*, starts_ray: bool) -> dict[str, str]:
    """What Ray reads when it is imported."""
    # Lines of different requests are no repetition; and once the service has ended, no thread of Serve's may look for
    # another Ray to join.
    environment = {"RAY_DEDUP_LOGS": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
    if starts_ray:
        # Ray's ports unpickle what comes, so whoever reaches one could do anything: only those who know this are heard.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    return environment


def _loading(config: ClusterConfig) -> str:
    num_workers, num_ranks = config.num_workers, config.engine.tensor_parallel_size
    ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
    return f"loading {config.served_model_name} in {num_workers} worker{'s' if num_workers > 1 else ''}{ranks}"


def _served(config: ClusterConfig) -> str:
    scheme = "http" if config.tls is None else "https"
    grpc = f" and by gRPC at {config.host}:{config.grpc_port}" if config.grpc_port else ""
    return f"{config.served_model_name} is served at {scheme}://{config.host}:{config.port}/v1{grpc} (Ctrl-C stops it)"


def _behind_tls(config: ClusterConfig) -> ClusterConfig:
    """Where Serve listens: as it says, or where only what takes TLS can reach it."""
    if config.tls is None:
        return config
    port = free_ports(2)
    return replace(config, host="127.0.0.1", port=port, grpc_port=port + 1 if config.grpc_port else 0)


def _problem_with_tenants(path: Path | None) -> str | None:
    """What the ingresses complain of in their logs, where nobody looks until it is too late."""
    try:
        if path is not None:
            read_tenants_file(path)
    except ConfigError as error:
        return str(error)
    return None


def _check_ports(config: ClusterConfig) -> None:
    """Raise `ConfigError` if somebody else listens where the service shall."""
    for name, port in (("port", config.port), ("grpc_port", config.grpc_port)):
        if port and (problem := problem_with_listening(config.host, port)) is not None:
            raise ConfigError(name, f"cannot listen on {config.host}:{port}: {problem}")
