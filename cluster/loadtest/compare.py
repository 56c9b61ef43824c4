"""Two load tests side by side: how figures changed, and whether the same requests got the same answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.worker.errors import ConfigError

COMPARED = (
    "failed_requests",
    "request_rps",
    "goodput_rps",
    "output_tokens_per_s",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "tpot_p50_ms",
    "e2e_p50_ms",
    "e2e_p90_ms",
    "hit_ratio",
    "hit_ratio_over_ideal",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was saved."""

    summary: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SameAnswers:
    """Of the requests that succeeded in both."""

    num_equal: int
    num_different: int
    num_other_prompt: int
    """Not the same was asked: another workload or seed, or an earlier answer of the conversation was different."""
    num_in_one_only: int


def requests_path(path: Path) -> Path:
    """Where the requests of a run lie whose figures are in `path`, which ends in .json."""
    return path.with_name(path.name.removesuffix(".json") + ".requests.jsonl")


def save(path: Path, run: Run) -> None:
    """Write the summary to `path` and the requests beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run.summary, indent=2) + "\n", encoding="utf-8")
    requests_path(path).write_text("".join(json.dumps(request) + "\n" for request in run.requests), encoding="utf-8")


def load(path: Path) -> Run:
    """Read a run. Raises `ConfigError`."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        requests = [json.loads(line) for line in requests_path(path).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError("run", f"cannot read {error.filename}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("run", f"{path} is no saved run: {error}") from error
    stages = summary.get("stages", []) if isinstance(summary, dict) else None
    if (
        not isinstance(stages, list)
        or not all(isinstance(stage, dict) and _is_number(stage.get("rate")) for stage in stages)
        or not all(isinstance(request, dict) for request in requests)
    ):
        raise ConfigError("run", f"{path} is no saved run")
    return Run(summary, requests)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def same_answers(before: Run, after: Run) -> SameAnswers:
    """By stage, session and turn."""

    def digests(run: Run) -> dict[tuple[str, ...], tuple[str, str]]:
        return {
            tuple(str(request.get(name)) for name in ("stage", "session", "turn")): (
                str(request.get("prompt_digest")),
                str(request.get("text_digest")),
            )
            for request in run.requests
            if request.get("error") is None and "text_digest" in request
        }

    one, other = digests(before), digests(after)
    pairs = [(one[key], other[key]) for key in one.keys() & other.keys()]
    same_prompt = [(a, b) for (asked, a), (also_asked, b) in pairs if asked == also_asked]
    num_equal = sum(a == b for a, b in same_prompt)
    return SameAnswers(
        num_equal,
        len(same_prompt) - num_equal,
        num_other_prompt=len(pairs) - len(same_prompt),
        num_in_one_only=len(one.keys() ^ other.keys()),
    )


def lines(before: Run, after: Run) -> list[str]:
    """For people to read."""
    text = [f"{'':>24} {'before':>12} {'after':>12} {'ratio':>8}", *_figures(before.summary, after.summary)]
    stages, later = ({each["rate"]: each for each in run.summary.get("stages", ())} for run in (before, after))
    for rate in sorted(stages.keys() | later.keys()):
        only = "" if rate in stages and rate in later else f", {'before' if rate in stages else 'after'} only"
        text += [f"{rate:g} sessions/s{only}", *_figures(stages.get(rate, {}), later.get(rate, {}))]
    same = same_answers(before, after)
    text.append(
        f"answers: {same.num_equal} equal, {same.num_different} different, {same.num_other_prompt} to other prompts, "
        f"{same.num_in_one_only} in one run only"
    )
    return text


def _figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    text = []
    for name in COMPARED:
        old, new = before.get(name), after.get(name)
        if _is_number(old) or _is_number(new):
            ratio = f"{new / old:8.3f}" if _is_number(old) and _is_number(new) and old else f"{'-':>8}"
            text.append(f"{name:>24} {_shown(old)} {_shown(new)} {ratio}")
    return text


def _shown(value: Any) -> str:
    return f"{value:12,.2f}" if _is_number(value) else f"{'-':>12}"
