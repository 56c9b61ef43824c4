"""What commands show to servers that ask for keys, and whose certificates they believe."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pagoda.worker.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def credential_options(command: F) -> F:
    """Adds `--api-key` and `--ca-cert`."""
    command = click.option(
        "--ca-cert",
        type=click.Path(path_type=Path),
        help="PEM file of the authority that the server's certificate is of.  [default: those of the system]",
    )(command)
    return click.option("--api-key", envvar="PAGODA_API_KEY", show_envvar=True, help="For servers that ask for one.")(
        command
    )


def trust(ca_cert: Path | None) -> ssl.SSLContext:
    """Whose certificates are believed. Raises `ConfigError`."""
    try:
        return ssl.create_default_context(cafile=ca_cert)
    except OSError as error:  # of which ssl.SSLError is one
        raise ConfigError("ca_cert", f"{ca_cert}: {error}") from error
