"""`pagoda model`: fetch and list models."""

from pathlib import Path

import click

from pagoda.cluster.commands.options import model_cache_option
from pagoda.cluster.commands.progress import show_progress
from pagoda.worker.model_store import DEFAULT_MODEL, KNOWN_MODELS, ModelStore


@click.group()
def model() -> None:
    """Fetch and list models."""


@model.command()
@click.argument("name", default=DEFAULT_MODEL)
@model_cache_option
def fetch(name: str, model_cache: Path) -> None:
    """Make the model NAME ready: a known name, or a Hugging Face repository as ORGANISATION/NAME.

    Without a name, the model that is served by default.

    Safe to interrupt and to repeat. A model that is here already is checked, and fetched again if it is damaged.
    """
    with show_progress() as progress:
        path = ModelStore(model_cache).fetch(name, progress=progress)
    click.echo(path)


@model.command("list")
@model_cache_option
def list_models(model_cache: Path) -> None:
    """List the models that are ready and those that can be fetched by name."""
    stored = {found.name: found for found in ModelStore(model_cache).list()}
    for found in stored.values():
        click.echo(f"{found.name}\tready\t{found.num_bytes / 1e6:.0f} MB\t{found.source}\t{found.path}")
    for known in KNOWN_MODELS.values():
        if known.name not in stored:
            click.echo(f"{known.name}\tnot fetched\t\t{known.description}")
