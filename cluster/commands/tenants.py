"""`pagoda tenants`: keys for the file that `pagoda serve --tenants` reads."""

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import click
import yaml

from pagoda.cluster.strict_yaml import read_yaml
from pagoda.cluster.tenants_file import hash_of_key, parse_tenants
from pagoda.worker.errors import ConfigError

_KEY_BYTES = 32
"""256 random bits: see `tenants_file.py`."""


@click.group()
def tenants() -> None:
    """Say who may use a service."""


@tenants.command()
@click.argument("name")
@click.option("--file", "path", type=click.Path(path_type=Path), required=True, help="The file; made if there is none.")
@click.option("--weight", type=float, help="Its share, beside others' shares, of what the workers do.  [default: 1]")
@click.option("--operator", is_flag=True, help="It may see /metrics and end anybody's requests.")
def add(name: str, path: Path, weight: float | None, operator: bool) -> None:
    """Make a key for tenant NAME, who is added if new, and print it.

    The file gets only the key's hash: what is printed is all there is of it. A service that runs takes the key within
    seconds. The file is written anew, without its comments.
    """
    content = read_yaml(path) if path.exists() else None
    content = {"tenants": []} if content is None else content
    parse_tenants(content, path)
    key = f"pagoda-{secrets.token_urlsafe(_KEY_BYTES)}"
    tenant = next((each for each in content["tenants"] if each["name"] == name), None)
    if tenant is None:
        tenant = {"name": name, "keys": []}
        if content.get("secret_file") is None:
            tenant["secret"] = secrets.token_hex(_KEY_BYTES)
        content["tenants"].append(tenant)
    tenant["keys"] = [*tenant.get("keys", []), hash_of_key(key)]
    if weight is not None:
        tenant["weight"] = weight
    if operator:
        tenant["operator"] = True
    parse_tenants(content, path)
    _write(path, content)
    click.echo(key)


def _write(path: Path, content: Any) -> None:
    """All of it or nothing, for a service may read it at any time; only its owner may read it."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            try:
                yaml.safe_dump(content, file, sort_keys=False, allow_unicode=True)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error}") from error
