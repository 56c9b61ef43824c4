"""What a load test comes to, as numbers. Percentiles are of requests that succeeded; failures are counted apart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.runner import LoadResult

PERCENTILES = (50, 90, 95, 99)
MAX_CPU_RATIO = 0.9
MAX_LAG_P99_S = 0.05
MAX_LATE_P99_S = 0.05
"""A client above one of these measures itself."""
LEAST_CPU_TIME_S = 1.0
"""A shorter test says nothing of the client's load."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        if record.error is not None or record.first_s is None:
            return False
        tpot_s = record.tpot_s
        return (
            (self.ttft_s is None or record.ttft_s <= self.ttft_s)
            and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)
            and (self.e2e_s is None or record.e2e_s <= self.e2e_s)
        )


def summarize(
    result: LoadResult, slo: Slo, ideal_cached: Mapping[tuple[int, int], int] | None = None
) -> dict[str, Any]:
    """One flat object, metric -> number; None where there is nothing to measure."""
    good = [record for record in result.records if record.error is None]
    seconds = max(result.duration_s, 1e-9)
    num_good = sum(slo.is_met(record) for record in result.records)
    num_ended = sum(record.error != "interrupted" for record in result.records)
    errors = Counter(record.error for record in result.records if record.error is not None)
    summary: dict[str, Any] = {
        "duration_s": result.duration_s,
        "num_requests": len(result.records),
        "succeeded_requests": len(good),
        "failed_requests": len(result.records) - len(good),
        "resent_requests": sum(record.num_resent for record in result.records),
        **{f"failed_{kind}": count for kind, count in sorted(errors.items())},
        "request_rps": len(good) / seconds,
        "goodput_rps": num_good / seconds,
        "good_ratio": num_good / num_ended if num_ended else None,
        "output_tokens_per_s": sum(record.num_output_tokens for record in good) / seconds,
        "prompt_tokens": sum(record.num_prompt_tokens or 0 for record in good),
        "output_tokens": sum(record.num_output_tokens for record in good),
        "most_at_once": most_at_once(result.records),
    }
    summary |= _distribution("ttft", [record.ttft_s for record in good])
    summary |= _distribution("itl", [gap for record in good for gap in record.gaps_s])
    summary |= _distribution("tpot", [tpot for record in good if (tpot := record.tpot_s) is not None])
    summary |= _distribution("e2e", [record.e2e_s for record in good])
    summary |= _hits(good, ideal_cached)
    return summary | _client(result)


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, interpolated as numpy does."""
    if not seconds:
        return {f"{name}_mean_ms": None, **{f"{name}_p{p}_ms": None for p in PERCENTILES}, f"{name}_max_ms": None}
    values = np.asarray(seconds) * 1e3
    points = {
        f"{name}_p{p}_ms": float(value)
        for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
    return {f"{name}_mean_ms": float(values.mean()), **points, f"{name}_max_ms": float(values.max())}


def _hits(good: Sequence[RequestRecord], ideal: Mapping[tuple[int, int], int] | None) -> dict[str, float | None]:
    """Of prompt tokens, those from a cache: as the server says, as they could have been, and one over the other."""
    told = [record for record in good if record.num_cached_tokens is not None and record.num_prompt_tokens]
    prompt = sum(record.num_prompt_tokens or 0 for record in told)
    cached = sum(record.num_cached_tokens or 0 for record in told)
    hit_ratio = cached / prompt if prompt else None
    result: dict[str, float | None] = {"hit_ratio": hit_ratio, "ideal_hit_ratio": None, "hit_ratio_over_ideal": None}
    if ideal is not None and prompt:
        best = sum(ideal.get((record.session, record.turn), 0) for record in told)
        result["ideal_hit_ratio"] = best / prompt
        result["hit_ratio_over_ideal"] = cached / best if best else None
    return result


def _client(result: LoadResult) -> dict[str, Any]:
    lateness = [record.sent_s - record.intended_s for record in result.records]
    lag_p99 = float(np.percentile(result.tick_lag_s, 99)) if result.tick_lag_s else 0.0
    late_p99 = float(np.percentile(lateness, 99)) if lateness else 0.0
    num_late = sum(late_s > MAX_LATE_P99_S for late_s in lateness)
    is_late = late_p99 > MAX_LATE_P99_S and num_late > 1  # of few requests, the 99th percentile is the worst one
    is_busy = result.client_cpu_ratio > MAX_CPU_RATIO and result.duration_s >= LEAST_CPU_TIME_S
    return {
        "sent_late_p99_ms": late_p99 * 1e3 if lateness else None,
        "client_cpu_ratio": result.client_cpu_ratio,
        "client_lag_p99_ms": lag_p99 * 1e3,
        "client_is_bottleneck": is_busy or lag_p99 > MAX_LAG_P99_S or is_late,
        "was_interrupted": result.was_interrupted,
    }


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """The most requests that were under way at one time."""
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def knee(stages: Sequence[Mapping[str, Any]], *, least_good_ratio: float = 0.9) -> float | None:
    """The highest of rising rates up to which so many requests were good at every one; None if not even the first."""
    best = None
    for stage in stages:
        if stage["was_interrupted"] or (stage["good_ratio"] or 0.0) < least_good_ratio:
            break
        best = float(stage["rate"])
    return best


def lines(summary: Mapping[str, Any]) -> list[str]:
    """For people to read."""

    def number(name: str, form: str = "{:,.1f}") -> str:
        return "-" if summary[name] is None else form.format(summary[name])

    def percent(name: str) -> str:
        return "-" if summary[name] is None else f"{summary[name]:.1%}"

    kinds = ", ".join(f"{name.removeprefix('failed_')} {n}" for name, n in summary.items() if _is_failure_kind(name))
    text = [
        f"{summary['num_requests']} requests in {number('duration_s')} s, {summary['failed_requests']} failed"
        + (f" ({kinds})" if kinds else ""),
        f"{number('request_rps', '{:,.2f}')} requests/s, {number('output_tokens_per_s')} tokens/s",
        f"goodput {number('goodput_rps', '{:,.2f}')}/s ({percent('good_ratio')})",
        f"at most {summary['most_at_once']} requests at once",
        f"{'ms':>8} {'mean':>10} " + " ".join(f"{'p' + str(p):>10}" for p in PERCENTILES),
    ]
    text += [
        f"{name:>8} {number(f'{name}_mean_ms'):>10} "
        + " ".join(f"{number(f'{name}_p{p}_ms'):>10}" for p in PERCENTILES)
        for name in ("ttft", "itl", "tpot", "e2e")
    ]
    text.append(
        f"prompt tokens from a cache: {percent('hit_ratio')}; an unlimited one: {percent('ideal_hit_ratio')}; "
        f"reached of that: {percent('hit_ratio_over_ideal')}"
    )
    if summary["resent_requests"]:
        text.append(f"{summary['resent_requests']} requests found their kept connection closed and were sent again")
    if summary["client_is_bottleneck"]:
        text.append(
            f"WARNING: this client had too much to do ({percent('client_cpu_ratio')} of a core, timers "
            f"{number('client_lag_p99_ms')} and requests {number('sent_late_p99_ms')} ms late): figures are its own"
        )
    if summary["was_interrupted"]:
        text.append("interrupted: figures are of what had ended by then")
    if not summary["num_requests"]:
        text.append("nothing was due within the duration")
    return text


def _is_failure_kind(name: str) -> bool:
    return name.startswith("failed_") and name != "failed_requests"
