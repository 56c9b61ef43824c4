"""Runs what `pagoda bench` was asked for: one load test or one for each rate, with progress; writes what came of it."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import uvloop

from pagoda.cluster.loadtest import compare, report
from pagoda.cluster.loadtest.html import render
from pagoda.cluster.loadtest.ideal import ideal_cached_tokens, tokenize_all
from pagoda.cluster.loadtest.openai_target import OpenAITarget, TargetError
from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.runner import LoadOptions, LoadResult, LoadRunner, LoadState
from pagoda.cluster.loadtest.workloads import Workload

_PAUSE_BETWEEN_RATES_S = 2.0
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


def run_bench(workload: Workload, plan: BenchPlan) -> bool:
    """Whether every request succeeded. Raises `TargetError` if there is no such server or model."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bench(workload, plan))


async def _bench(workload: Workload, plan: BenchPlan) -> bool:
    target = _target(plan)
    try:
        target.model = await _model(target, plan.model)
        if plan.rates:
            return await _ramp(workload, target, plan)
        click.echo(f"{workload.name} on {target.model} at {plan.grpc or plan.url}", err=True)
        summary, records = await _measure(workload, target, plan, plan.options)
    finally:
        await target.close()
    summary = {"workload": workload.name, "model": target.model, "seed": plan.options.seed} | summary
    _save(plan, summary, records)
    for line in report.lines(summary):
        click.echo(line)
    return not summary["failed_requests"]


async def _ramp(workload: Workload, target: Any, plan: BenchPlan) -> bool:
    """Rate after rate, each with requests of its own, so that none profits from the one before it."""
    stages: list[dict[str, Any]] = []
    records: list[RequestRecord] = []
    for index, rate in enumerate(plan.rates):
        if index:
            await asyncio.sleep(_PAUSE_BETWEEN_RATES_S)
        click.echo(f"{workload.name} on {target.model}: {rate:g} sessions/s", err=True)
        options = replace(plan.options, rate=rate, seed=plan.options.seed + index)
        summary, records = await _measure(workload, target, plan, options)
        stages.append({"rate": rate} | summary)
        for line in report.lines(summary):
            click.echo(line)
        if summary["was_interrupted"]:
            break
    result = {"workload": workload.name, "model": target.model, "seed": plan.options.seed}
    result |= {"knee_rate": report.knee(stages), **stages[-1], "stages": stages}
    _save(plan, result, records)
    click.echo(f"knee: {result['knee_rate'] or 'below the lowest rate'}, the highest rate with 90 % of requests good")
    return not any(stage["failed_requests"] for stage in stages)


async def _measure(
    workload: Workload, target: Any, plan: BenchPlan, options: LoadOptions
) -> tuple[dict[str, Any], list[RequestRecord]]:
    progress = _Progress(options.duration_s)
    runner = LoadRunner(workload, target, options, on_progress=progress.show, keep_requests=plan.measure_ideal)
    result = await runner.run()
    progress.close()
    ideal = await _ideal(target, result) if plan.measure_ideal and not result.was_interrupted else None
    return report.summarize(result, plan.slo, ideal), result.records


async def _ideal(target: Any, result: LoadResult) -> dict[tuple[int, int], int] | None:
    click.echo(f"asking for the tokens of {len(result.requests)} prompts", err=True)
    prompts = await tokenize_all(target, result.requests)
    return None if prompts is None else ideal_cached_tokens(result.records, prompts)


def _target(plan: BenchPlan) -> Any:
    if plan.grpc is not None:
        from pagoda.cluster.loadtest.grpc_target import GrpcTarget
        from pagoda.proto import inference_pb2 as pb

        sampling = pb.Sampling(temperature=plan.temperature, ignore_eos=plan.ignore_eos)
        return GrpcTarget(plan.grpc, timeout_s=plan.timeout_s, sampling=sampling)
    fields: dict[str, Any] = {"temperature": plan.temperature}
    if plan.ignore_eos:
        fields["ignore_eos"] = True
    return OpenAITarget(plan.url, api_key=plan.api_key, timeout_s=plan.timeout_s, fields=fields)


async def _model(target: Any, wanted: str | None) -> str:
    served = await target.models()
    if not served:
        raise TargetError("the server serves no model")
    if wanted is not None and wanted not in served:
        raise TargetError(f"{wanted} is not served; served: {', '.join(served)}")
    return wanted or served[0]


def _save(plan: BenchPlan, summary: dict[str, Any], records: Sequence[RequestRecord]) -> None:
    compare.save(plan.output, compare.Run(summary, [record.as_json() for record in records]))
    click.echo(f"wrote {plan.output} and {compare.requests_path(plan.output)}", err=True)
    if plan.html is not None:
        plan.html.parent.mkdir(parents=True, exist_ok=True)
        title = f"{summary['workload']} on {summary['model']}"
        plan.html.write_text(render(title, summary, records))
        click.echo(f"wrote {plan.html}", err=True)


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
        click.echo(f"\r{line}\033[K" if self._is_watched else line, err=True, nl=not self._is_watched)

    def close(self) -> None:
        if self._is_watched and self._num_shown:
            click.echo(err=True)
