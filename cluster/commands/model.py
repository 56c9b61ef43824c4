"""`pagoda model`: fetch, list and inspect models."""

import json
from pathlib import Path
from typing import Any

import click

from pagoda.cluster.commands.model_report import InspectSettings, facts_as_text, model_facts
from pagoda.cluster.commands.options import model_cache_option
from pagoda.cluster.commands.progress import show_progress
from pagoda.worker.config import DTYPES, GIB, CacheConfig, SchedulerConfig, require_in_range
from pagoda.worker.errors import ModelError
from pagoda.worker.model_store import DEFAULT_MODEL, KNOWN_MODELS, ModelStore


@click.group()
def model() -> None:
    """Fetch, list and inspect models."""


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


@model.command()
@click.argument("name", metavar="PATH_OR_NAME", default=DEFAULT_MODEL)
@model_cache_option
@click.option("--kv-cache-gib", type=float, default=CacheConfig().memory_bytes / GIB, help="Memory of KV blocks, GiB.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", help="Type of the KV; auto takes the checkpoint's.")
@click.option("--block-size", type=int, default=CacheConfig().block_size, help="Tokens per KV block.")
@click.option(
    "--context-len", type=int, help="Tokens of the requests that are counted.  [default: the model's longest]"
)
@click.option("--tp", "tensor_parallel_size", type=int, default=1, help="Ranks that share the model; shows one's KV.")
@click.option(
    "--max-num-batched-tokens",
    type=int,
    default=SchedulerConfig().max_num_batched_tokens,
    help="Tokens computed in one step: layers with a window hold them besides the window.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")
def inspect(name: str, model_cache: Path, kv_cache_gib: float, as_json: bool, **options: Any) -> None:
    """Show what KV memory a model needs and what fits: a stored model, or the path of a folder with a config.json.

    Its weights need not be there; nothing is loaded.
    """
    require_in_range("kv_cache_gib", kv_cache_gib, 0.001, 2**20)
    settings = InspectSettings(memory_bytes=int(kv_cache_gib * GIB), **options)
    path = ModelStore(model_cache).resolve(name)
    if path is None:
        raise ModelError(f"{name!r} is neither a model folder nor a stored model; `pagoda model fetch` stores one")
    facts = model_facts(path, settings)
    click.echo(json.dumps(facts) if as_json else facts_as_text(facts))
