"""`pagoda directory`: a prefix directory that is no part of a Ray cluster."""

import asyncio
import logging
import signal

import click
import uvloop

from pagoda.cluster.logs import LOG_LEVELS, LogLevel
from pagoda.worker.config import require_in_range
from pagoda.worker.errors import ConfigError


@click.command()
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=int, default=9100, help="gRPC port; 0 takes a free one.")
@click.option("--token", envvar="PAGODA_DIRECTORY_TOKEN", show_envvar=True, help="What callers must show.")
@click.option("--lease-s", type=float, default=3.0, help="Seconds after which a silent worker is forgotten.")
@click.option("--seed", type=int, help="Of draws between workers that are equally good.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="At debug, a line for each placement.")
def directory(
    host: str, port: int, token: str | None, lease_s: float, seed: int | None, log_level: LogLevel | None
) -> None:
    """Run a prefix directory alone, until interrupted."""
    if log_level is not None:
        logging.getLogger("pagoda").setLevel(log_level.upper())
    if token is not None and not token.isascii():
        raise ConfigError("token", "must be ASCII: clients show it in a header")
    require_in_range("port", port, 0, 65535)
    require_in_range("lease_s", lease_s, 0.1, 3600)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(f"{host}:{port}", token, lease_s, seed))


async def _serve(address: str, token: str | None, lease_s: float, seed: int | None) -> None:
    from pagoda.cluster.directory.server import DirectoryServer

    server = DirectoryServer(token=token, seed=seed, lease_s=lease_s)
    try:
        port = await server.start(address)
    except RuntimeError as error:
        raise ConfigError("port", f"cannot listen on {address}: {error}") from error
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    click.echo(f"the directory listens at {address.rpartition(':')[0]}:{port} (Ctrl-C stops it)", err=True)
    await stopped.wait()
    await server.stop()
