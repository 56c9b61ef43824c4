"""`pagoda bench`: load on a server, and what came of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from pagoda.cluster.chat_client import authorization
from pagoda.cluster.commands.bench_run import BenchPlan, run_bench
from pagoda.cluster.commands.credentials import credential_options, trust
from pagoda.cluster.loadtest import compare, report
from pagoda.cluster.loadtest.arrivals import ARRIVAL_KINDS
from pagoda.cluster.loadtest.runner import LoadOptions
from pagoda.cluster.loadtest.trace import MAX_TOKENS, TRACE_BLOCK_TOKENS, TraceWorkload, read_trace
from pagoda.cluster.loadtest.workloads import (
    FIRST_TOKEN_ID,
    AgentWorkload,
    ChatWorkload,
    RandomWorkload,
    SharedPrefixWorkload,
    Workload,
)
from pagoda.worker.config import require_in_range
from pagoda.worker.errors import ConfigError

_MAX_BLOCK_TOKENS = 2**16
"""A trace's prompts have hundreds of blocks."""
_CHAT, _SHARED_PREFIX, _AGENTS, _RANDOM = ChatWorkload(), SharedPrefixWorkload(), AgentWorkload(), RandomWorkload()
"""Their defaults are the options'."""
F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Put load on a server with an OpenAI API, and measure.

    Sessions begin at a --rate (open loop), or a --concurrency of them runs at a time (closed loop). Everything is
    counted from when a request was due. Writes the figures, every request, and with --html a page with plots.
    """


def _load_options(function: F) -> F:
    """The options that every workload has."""
    for option in reversed(
        [
            click.option("--url", default="http://127.0.0.1:8000", help="The server."),
            click.option("--grpc", metavar="HOST:PORT", help="Send by gRPC to this address instead."),
            click.option("--model", help="Which of its models.  [default: the first it names]"),
            credential_options,
            click.option("--rate", type=float, help="Sessions a second that begin."),
            click.option("--rates", help="Several, such as 1,2,4: one after the other, up to the knee and beyond."),
            click.option(
                "--arrivals", type=click.Choice(ARRIVAL_KINDS), default="poisson", help="How they follow each other."
            ),
            click.option("--burst-size", type=int, default=8, help="Sessions of a burst."),
            click.option("--concurrency", type=int, help="Sessions at a time, instead of a rate."),
            click.option("--duration-s", type=float, default=60.0, help="Nothing is sent that is due later."),
            click.option("--sessions", "max_sessions", type=int, help="At most so many.  [default: no limit]"),
            click.option("--seed", type=int, default=0, help="Same seed, same requests at the same times."),
            click.option("--timeout-s", type=float, default=600.0, help="After which a request has failed."),
            click.option(
                "--sampling-seeds", is_flag=True, help="A seed in each request: sampled answers can be compared, too."
            ),
            click.option("--temperature", type=float, default=0.0, help="0 is greedy: answers can be compared."),
            click.option(
                "--ignore-eos/--respect-eos", default=True, help="Answers as long as asked for; vLLM's extension."
            ),
            click.option("--slo-ttft-ms", type=float, help="A good request's first token comes within this."),
            click.option("--slo-tpot-ms", type=float, help="... and the others, on average, each within this."),
            click.option("--slo-e2e-ms", type=float, help="... and all of it within this."),
            click.option(
                "--ideal/--no-ideal", "measure_ideal", default=True,
                help="Also tell what an unlimited cache would have hit; asks the server for tokens afterwards.",
            ),
            click.option("--output", type=click.Path(path_type=Path), default=Path("load.json"), help="Figures."),
            click.option("--html", type=click.Path(path_type=Path), help="A page with plots."),
        ]
    ):  # fmt: skip
        function = option(function)
    return function


@bench.command()
@_load_options
@click.option("--turns", "num_turns", type=int, default=_CHAT.num_turns, help="Of a conversation, on average.")
@click.option("--system-prompts", "num_system_prompts", type=int, default=_CHAT.num_system_prompts, help="Kinds.")
@click.option("--system-tokens", type=int, default=_CHAT.system_tokens, help="Of each of them.")
@click.option("--user-tokens", type=int, default=_CHAT.user_tokens, help="Of a message, on average.")
@click.option("--output-tokens", type=int, default=_CHAT.output_tokens, help="Of an answer, on average.")
@click.option("--pause-s", type=float, default=_CHAT.pause_s, help="Before the next message, on average.")
def chat(**options: Any) -> None:
    """Conversations of several turns with shared system prompts."""
    _run(ChatWorkload, options)


@bench.command()
@_load_options
@click.option("--groups", "num_groups", type=int, default=_SHARED_PREFIX.num_groups, help="Different beginnings.")
@click.option("--prefix-tokens", type=int, default=_SHARED_PREFIX.prefix_tokens, help="Of each of them.")
@click.option("--question-tokens", type=int, default=_SHARED_PREFIX.question_tokens, help="Of what is behind it.")
@click.option("--output-tokens", type=int, default=_SHARED_PREFIX.output_tokens, help="Of an answer.")
def shared_prefix(**options: Any) -> None:
    """Single questions behind one of several long texts."""
    _run(SharedPrefixWorkload, options)


@bench.command()
@_load_options
@click.option("--turns", "num_turns", type=int, default=_AGENTS.num_turns, help="Of a loop.")
@click.option("--system-tokens", type=int, default=_AGENTS.system_tokens, help="Of the one system prompt.")
@click.option("--tool-tokens", type=int, default=_AGENTS.tool_tokens, help="That a turn adds, on average.")
@click.option("--output-tokens", type=int, default=_AGENTS.output_tokens, help="Of an answer.")
def agents(**options: Any) -> None:
    """Loops whose context grows with every turn, without a pause."""
    _run(AgentWorkload, options)


@bench.command("random")
@_load_options
@click.option("--input-tokens", type=int, default=_RANDOM.input_tokens, help="Of a prompt.")
@click.option("--output-tokens", type=int, default=_RANDOM.output_tokens, help="Of an answer.")
@click.option("--range-ratio", type=float, default=0.0, help="Lengths vary by this part, up and down.")
@click.option("--vocab-size", type=int, default=_RANDOM.vocab_size, help="Ids are below this.")
def random_(**options: Any) -> None:
    """Completions of random token ids, nothing in common."""
    require_in_range("range_ratio", options["range_ratio"], 0, 1)
    _run(RandomWorkload, options)


@bench.command()
@_load_options
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--block-tokens", type=int, default=TRACE_BLOCK_TOKENS, help="For each 512 recorded.")
@click.option("--output-scale", type=float, default=1.0, help="Times the recorded length.")
@click.option("--max-input-tokens", type=int, help="Longer inputs are cut.  [default: no limit]")
@click.option("--speed", type=float, default=1.0, help="Times as fast as recorded; only without rate and concurrency.")
@click.option("--vocab-size", type=int, default=_RANDOM.vocab_size, help="Ids are below this.")
@click.option("--max-rows", type=int, help="Only the first of the trace.  [default: all]")
def trace(file: Path, max_rows: int | None, **options: Any) -> None:
    """Replay recorded traffic: JSON lines as Mooncake publishes them."""
    for name in ("speed", "output_scale"):
        require_in_range(name, options[name], 1e-6, 1e6)
    if max_rows is not None:
        require_in_range("max_rows", max_rows, 1, 10**9)
    recorded = read_trace(file, max_rows=max_rows)
    num_bad = sum(recorded.bad_lines.values())
    if num_bad:
        click.echo(f"{num_bad} lines of {file} left out; {recorded.first_problem}", err=True)
    notes = {"trace_lines": len(recorded.rows), "bad_trace_lines": num_bad}
    notes |= {f"bad_trace_lines_{kind}": count for kind, count in recorded.bad_lines.items()}
    _run(lambda **lengths: TraceWorkload(recorded, **lengths), options, trace=file, notes=notes)


@bench.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def compare_(before: Path, after: Path) -> None:
    """Two saved runs: figures side by side, and whether answers are equal."""
    for line in compare.lines(compare.load(before), compare.load(after)):
        click.echo(line)


def _run(
    make: Callable[..., Workload],
    options: dict[str, Any],
    *,
    trace: Path | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    plan = replace(_plan(options, has_times=trace is not None), notes=notes or {}, trace=trace)
    if "vocab_size" in options:
        require_in_range("vocab_size", options["vocab_size"], FIRST_TOKEN_ID + 1, 10**7)
    for name, value in options.items():  # what is left are lengths and counts
        if isinstance(value, int) and not isinstance(value, bool):
            least = 0 if name == "num_system_prompts" else 1
            most = _MAX_BLOCK_TOKENS if name == "block_tokens" else MAX_TOKENS if name.endswith("_tokens") else 10**7
            require_in_range(name, value, least, most)
    if "pause_s" in options:
        require_in_range("pause_s", options["pause_s"], 0, 1e6)
    workload = make(**options)
    if not run_bench(workload, plan):
        raise SystemExit(1)


def _plan(options: dict[str, Any], *, has_times: bool) -> BenchPlan:
    """Take the common options out of `options`. Raises `ConfigError`."""
    common = {name: options.pop(name) for name in (
        "url", "grpc", "model", "api_key", "ca_cert", "timeout_s", "temperature", "ignore_eos", "measure_ideal",
        "output", "html",
    )}  # fmt: skip
    rate, rates, concurrency = (options.pop(name) for name in ("rate", "rates", "concurrency"))
    given = [
        name for name, value in (("rate", rate), ("rates", rates), ("concurrency", concurrency)) if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(given[1], f"cannot be given with --{given[0]}")
    if not given and not has_times:
        raise ConfigError("rate", "one of --rate, --rates and --concurrency is needed")
    authorization(common["api_key"])
    trust(common["ca_cert"])
    if common["grpc"] is not None and not (common["grpc"].isascii() and common["grpc"].isprintable()):
        raise ConfigError("grpc", "must be printable ASCII")
    slo = {name: options.pop(f"slo_{name}_ms") for name in ("ttft", "tpot", "e2e")}
    for name, value in slo.items():
        if value is not None:
            require_in_range(f"slo_{name}_ms", value, 0, 1e9)
    load = LoadOptions(
        rate=rate,
        concurrency=concurrency,
        as_recorded=not given,
        **{
            name: options.pop(name)
            for name in ("arrivals", "burst_size", "duration_s", "max_sessions", "seed", "sampling_seeds")
        },
    )
    for name, value, least, most in (
        ("rate", rate, 1e-6, 1e6),
        ("concurrency", concurrency, 1, 100_000),
        ("burst_size", load.burst_size, 1, 100_000),
        ("duration_s", load.duration_s, 1e-3, 1e7),
        ("max_sessions", load.max_sessions, 1, 10**9),
        ("timeout_s", common["timeout_s"], 1e-3, 1e6),
        ("temperature", common["temperature"], 0, 100),
    ):
        if value is not None:
            require_in_range(name, value, least, most)
    return BenchPlan(
        **common,
        options=load,
        rates=_rates(rates) if rates is not None else (),
        slo=report.Slo(**{f"{name}_s": None if value is None else value / 1e3 for name, value in slo.items()}),
    )


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError("rates", f"must be numbers with commas between them, got {text!r}") from error
    for rate in rates:
        require_in_range("rates", rate, 1e-6, 1e6)
    if list(rates) != sorted(set(rates)):
        raise ConfigError("rates", f"must rise, got {text}")
    return rates
