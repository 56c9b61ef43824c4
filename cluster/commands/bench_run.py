"""Runs what `pagoda bench` was asked for: one load test or one for each rate, with progress; writes what came of it."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from pagoda.cluster.commands.credentials import trust
from pagoda.cluster.loadtest import compare, report
from pagoda.cluster.loadtest.html import render
from pagoda.cluster.loadtest.ideal import ideal_cached_tokens, tokenize_all
from pagoda.cluster.loadtest.openai_target import OpenAITarget
from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.runner import LoadOptions, LoadRunner, LoadState
from pagoda.cluster.loadtest.target import Target, TargetError
from pagoda.cluster.loadtest.workloads import Workload
from pagoda.worker.errors import ConfigError

T = TypeVar("T")
_PAUSE_BETWEEN_RATES_S = 2.0
_MAX_FILES = 65_536
_MAX_SIGNALS = 2
_SAY_EVERY_S = 5
"""Where nobody watches."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What the options come to."""

    url: str
    grpc: str | None
    """host:port, instead of `url`."""
    model: str | None
    """None for the first that is served."""
    api_key: str | None
    ca_cert: Path | None
    timeout_s: float
    temperature: float
    ignore_eos: bool
    options: LoadOptions
    rates: tuple[float, ...]
    """One load test for each; empty for a single one."""
    slo: report.Slo
    measure_ideal: bool
    output: Path
    html: Path | None
    notes: dict[str, Any] = field(default_factory=dict)
    """More to say of the workload."""
    trace: Path | None = None
    """What is replayed, which must not be overwritten."""


def run_bench(workload: Workload, plan: BenchPlan) -> bool:
    """Whether every request succeeded. Raises `TargetError` if there is no such server or model."""
    _check_outputs(plan)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bench(workload, plan))


def _raise_file_limit() -> None:
    """Every stream is an open file, and shells often allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _bench(workload: Workload, plan: BenchPlan) -> bool:
    target = _target(plan)
    phases = _Phases()
    try:
        target.model = await _model(target, plan.model)
        if plan.rates:
            return await _ramp(workload, target, plan, phases)
        _say(f"{workload.name} on {target.model} at {plan.grpc or plan.url}", err=True)
        summary, records = await _measure(workload, target, plan, plan.options, phases)
        summary = _head(workload, target, plan) | summary
        try:
            _save(plan, summary, records, [record.as_json() for record in records])
        finally:
            for line in report.lines(summary):
                _say(line)
    finally:
        await target.close()
    return bool(summary["num_requests"]) and not summary["failed_requests"] and not summary["was_interrupted"]


def _head(workload: Workload, target: Target, plan: BenchPlan) -> dict[str, Any]:
    """What was measured, and how."""
    load = plan.options
    lengths = {name: getattr(workload, name) for name in getattr(workload, "__dataclass_fields__", ())}
    return {
        "workload": workload.name,
        "model": target.model,
        "target": plan.grpc or plan.url,
        "seed": load.seed,
        "sessions_per_s": load.rate,
        "arrivals": None if load.concurrency is not None or load.as_recorded else load.arrivals,
        "burst_size": load.burst_size if load.arrivals == "bursts" else None,
        "concurrency": load.concurrency,
        "planned_rates": list(plan.rates) or None,
        "planned_duration_s": load.duration_s,
        "max_sessions": load.max_sessions,
        "timeout_s": plan.timeout_s,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "trace": None if plan.trace is None else str(plan.trace),
        **{f"slo_{name}": limit for name, limit in asdict(plan.slo).items()},
        **{f"workload_{name}": value for name, value in lengths.items() if isinstance(value, int | float | str | None)},
    } | plan.notes


async def _ramp(workload: Workload, target: Target, plan: BenchPlan, phases: "_Phases") -> bool:
    """Rate after rate, each with requests of its own, so that none profits from the one before it."""
    stages: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    for index, rate in enumerate(plan.rates):
        if index and not await phases.run(asyncio.sleep(_PAUSE_BETWEEN_RATES_S, result=True)):
            break
        _say(f"{workload.name} on {target.model}: {rate:g} sessions/s", err=True)
        options = replace(plan.options, rate=rate, seed=plan.options.seed + index)
        summary, records = await _measure(workload, target, plan, options, phases)
        stages.append({"rate": rate, "seed": options.seed} | summary)
        requests += [{"stage": index} | record.as_json() for record in records]
        result = _head(workload, target, plan) | _totals(stages, len(plan.rates))
        try:
            _save(plan, result, records, requests)  # each time, so that whatever comes later loses nothing
        finally:
            for line in report.lines(summary):
                _say(line)
        if summary["was_interrupted"]:
            break
    _say(f"knee: {result['knee_rate'] or 'below the lowest rate'}, the highest rate with 90 % of requests good")
    if result["was_interrupted"]:
        _say(f"interrupted: {len(stages)} of {len(plan.rates)} rates were tried")
    return not result["was_interrupted"] and not result["failed_requests"]


def _totals(stages: Sequence[dict[str, Any]], num_planned: int) -> dict[str, Any]:
    """What the stages come to so far. As long as one is missing, it was interrupted."""
    totals = {name: sum(stage[name] for stage in stages) for name in ("num_requests", "failed_requests")}
    was_interrupted = len(stages) < num_planned or stages[-1]["was_interrupted"]
    return {"knee_rate": report.knee(stages), "was_interrupted": was_interrupted, **totals, "stages": list(stages)}


class _Phases:
    """Ctrl-C ends what runs now and nothing else: what was measured is kept. A third one ends everything."""

    def __init__(self) -> None:
        self._running: asyncio.Task[Any] | None = None
        self._num_signals = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGINT, self._on_signal)

    async def run(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None if it was ended and returned nothing."""
        self._num_signals = 0
        task: asyncio.Task[T] = self._loop.create_task(work)
        self._running = task
        try:
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) is not None and own.cancelling():
                raise
            return None
        finally:
            self._running = None

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._running is None or self._num_signals > _MAX_SIGNALS:
            self._loop.remove_signal_handler(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        elif not self._running.cancelling():
            self._running.cancel()


async def _measure(
    workload: Workload, target: Target, plan: BenchPlan, options: LoadOptions, phases: _Phases
) -> tuple[dict[str, Any], list[RequestRecord]]:
    progress = _Progress(options.duration_s)
    runner = LoadRunner(workload, target, options, on_progress=progress.show, keep_requests=plan.measure_ideal)
    result = await phases.run(runner.run())
    if result is None:  # before it began
        raise click.Abort
    progress.close()
    ideal: dict[tuple[int, int], int] | None = None
    if plan.measure_ideal and not result.was_interrupted:
        _say(f"asking for the tokens of {len(result.requests)} prompts (Ctrl-C goes on without)", err=True)
        prompts = await phases.run(tokenize_all(target, result.requests))
        ideal = None if prompts is None else ideal_cached_tokens(result.records, prompts)
    return report.summarize(result, plan.slo, ideal), result.records


def _target(plan: BenchPlan) -> Target:
    if plan.grpc is not None:
        from pagoda.cluster.loadtest.grpc_target import GrpcTarget
        from pagoda.proto import inference_pb2 as pb

        sampling = pb.Sampling(temperature=plan.temperature, ignore_eos=plan.ignore_eos)
        return GrpcTarget(
            plan.grpc,
            api_key=plan.api_key,
            authority=None if plan.ca_cert is None else plan.ca_cert.read_bytes(),
            timeout_s=plan.timeout_s,
            sampling=sampling,
        )
    fields: dict[str, Any] = {"temperature": plan.temperature}
    if plan.ignore_eos:
        fields["ignore_eos"] = True
    return OpenAITarget(
        plan.url, api_key=plan.api_key, tls=trust(plan.ca_cert), timeout_s=plan.timeout_s, fields=fields
    )


async def _model(target: Target, wanted: str | None) -> str:
    served = await target.models()
    if not served:
        raise TargetError("the server serves no model")
    if wanted is not None and wanted not in served:
        raise TargetError(f"{wanted} is not served; served: {', '.join(served)}")
    return wanted or served[0]


def _check_outputs(plan: BenchPlan) -> None:
    """Raises `ConfigError` now, not when all is done."""
    if plan.output.suffix != ".json":
        raise ConfigError("output", f"must end in .json, got {plan.output}")
    paths = {"output": [plan.output, compare.requests_path(plan.output)], "html": [plan.html] if plan.html else []}
    if plan.html and plan.html.resolve() in [path.resolve() for path in paths["output"]]:
        raise ConfigError("html", f"{plan.html} is where the figures go")
    for name, outputs in paths.items():
        for output in outputs:
            path = output.resolve()  # what a link stands for, which may not be there yet
            if plan.trace is not None and path == plan.trace.resolve():
                raise ConfigError(name, f"{path} would overwrite the trace")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                was_there = path.exists()
                path.open("a").close()
                if not was_there:
                    path.unlink()
            except OSError as error:
                raise ConfigError(name, f"cannot write {path}: {error.strerror}") from error


def _save(
    plan: BenchPlan, summary: dict[str, Any], records: Sequence[RequestRecord], requests: Sequence[dict[str, Any]]
) -> None:
    """`requests` go into a file, `records` are drawn."""
    try:
        compare.save(plan.output, compare.Run(summary, requests))
        _say(f"wrote {plan.output} and {compare.requests_path(plan.output)}", err=True)
        if plan.html is not None:
            page = render(f"{summary['workload']} on {summary['model']}", summary, records)
            plan.html.write_text(page, encoding="utf-8")
            _say(f"wrote {plan.html}", err=True)
    except OSError as error:
        raise ConfigError("output", f"cannot write: {error}") from error


def _say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print; whoever has read this may have hung up, which is no reason to lose what was measured."""
    try:
        click.echo(text, err=err, nl=nl)
    except OSError:
        stream = sys.stderr if err else sys.stdout
        with suppress(OSError, ValueError):  # else what is left in its buffer fails again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Progress:
    """A line that changes where someone watches, else one now and then."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._is_watched = sys.stderr.isatty()
        self._num_shown = 0

    def show(self, state: LoadState) -> None:
        self._num_shown += 1
        if not self._is_watched and self._num_shown % _SAY_EVERY_S:
            return
        line = (
            f"{state.elapsed_s:6.0f} of {self._duration_s:.0f} s: {state.num_sessions} sessions, "
            f"{state.num_running} requests running, {state.num_succeeded} done, {state.num_failed} failed, "
            f"{state.num_tokens / max(state.elapsed_s, 1e-9):,.0f} tokens/s"
        )
        _say(f"\r{line}\033[K" if self._is_watched else line, err=True, nl=not self._is_watched)

    def close(self) -> None:
        if self._is_watched and self._num_shown:
            _say(err=True)
