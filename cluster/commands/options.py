"""Options that several commands share, and what they are turned into."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pagoda.cluster.commands.progress import show_progress
from pagoda.worker.config import DTYPES, GIB, CacheConfig, EngineConfig, SchedulerConfig, require_in_range
from pagoda.worker.errors import ConfigError
from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore
from pagoda.worker.tokenizer import check_tokenizer

FAKE_STEP_S, FAKE_TOKEN_S = 0.01, 0.0002
"""Of `--fake`: about a small model on a small GPU."""


def model_cache_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--model-cache",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_STORE,
        envvar="PAGODA_MODEL_CACHE",
        show_envvar=True,
        help="Folder of fetched models.",
    )(command)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of an engine; `engine_config` takes them."""
    cache, scheduler = CacheConfig(), SchedulerConfig()
    options: list[Callable[..., Any]] = [
        click.option("--model", default=DEFAULT_MODEL, help="Name of a model, or path of a Hugging Face model folder."),
        model_cache_option,
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default="auto",
            help="Type to compute in; auto takes the checkpoint's.",
        ),
        click.option("--device", default="auto", help="Torch device; auto takes a GPU where there is one."),
        click.option("--max-model-len", type=int, help="Longest prompt plus output, tokens.  [default: the model's]"),
        click.option(
            "--tp",
            "tensor_parallel_size",
            type=int,
            default=1,
            help="Ranks, processes that share each worker's model, each on a GPU or some cores.",
        ),
        click.option(
            "--threads", "num_threads", type=int, help="CPU threads of each rank.  [default: cores/(workers*ranks)]"
        ),
        click.option("--block-size", type=int, default=cache.block_size, help="Tokens per KV block."),
        click.option(
            "--kv-cache-gib", type=float, default=cache.memory_bytes / GIB, help="Memory of each rank's KV cache, GiB."
        ),
        click.option(
            "--prefix-caching/--no-prefix-caching",
            default=cache.enable_prefix_caching,
            help="Reuse the KV of prompts that begin alike.",
        ),
        click.option(
            "--max-num-seqs", type=int, default=scheduler.max_num_seqs, help="Sequences that run at once, per worker."
        ),
        click.option(
            "--max-num-batched-tokens",
            type=int,
            default=scheduler.max_num_batched_tokens,
            help="Tokens computed in one step, per worker.",
        ),
        click.option(
            "--max-num-waiting",
            type=int,
            default=scheduler.max_num_waiting,
            help="Sequences that may wait, per worker.",
        ),
        click.option(
            "--max-wait-s",
            type=float,
            help="Seconds to the first token; what can no longer make that is refused.  [default: any]",
        ),
        click.option(
            "--fake",
            is_flag=True,
            help=f"For load tests: no model, only its time, {FAKE_STEP_S} s a step and {FAKE_TOKEN_S} s a token.",
        ),
        click.option("--fake-step-s", type=float, help="Run no model; a step takes so long."),
        click.option("--fake-token-s", type=float, help="... and so much longer for each token that it computes."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def share_cores(options: dict[str, Any], *, num_workers: int = 1) -> None:
    """Give each rank of so many workers an equal share of this machine's cores, unless it was said how many."""
    if options["num_threads"] is None:
        num_ranks = max(1, num_workers) * max(1, options["tensor_parallel_size"])
        options["num_threads"] = max(1, (os.cpu_count() or 1) // num_ranks)


def engine_settings(options: dict[str, Any]) -> EngineConfig:
    """The engine config of `engine_options`, as yet without a model. Raises `ConfigError`."""
    if not options["model"]:
        raise ConfigError("model", "must not be empty")
    require_in_range("kv_cache_gib", options["kv_cache_gib"], 0.001, 2**20)
    cache = CacheConfig(
        block_size=options["block_size"],
        memory_bytes=int(options["kv_cache_gib"] * GIB),
        enable_prefix_caching=options["prefix_caching"],
    )
    scheduler = SchedulerConfig(
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_waiting=options["max_num_waiting"],
        max_wait_s=options["max_wait_s"],
    )
    plain = ("dtype", "device", "max_model_len", "num_threads", "tensor_parallel_size")
    settings = {name: options[name] for name in plain}
    step_s, token_s = options["fake_step_s"], options["fake_token_s"]
    if options["fake"]:
        step_s, token_s = (FAKE_STEP_S if step_s is None else step_s), (FAKE_TOKEN_S if token_s is None else token_s)
    elif token_s is not None and step_s is None:
        raise ConfigError("fake_token_s", "needs --fake or --fake-step-s")
    return EngineConfig(
        Path(), cache=cache, scheduler=scheduler, fake_step_s=step_s, fake_token_s=token_s or 0.0, **settings
    )


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine config of `engine_options`. Fetches the model if it is not here.

    Raises `ConfigError` or `ModelError`, before any long work where it can be known.
    """
    settings = engine_settings(options)  # complains before anything is fetched
    name, store = options["model"], ModelStore(options["model_cache"])
    path = store.resolve(name)
    if path is None:
        with show_progress() as progress:
            path = store.fetch(name, progress=progress)
    check_tokenizer(path)
    return replace(settings, model_path=path)
