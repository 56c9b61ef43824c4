"""A report to look at: one HTML file with its plots inside, for which no server is needed."""

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pagoda.cluster.loadtest.records import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STAGE_COLUMNS = (
    "rate",
    "num_requests",
    "failed_requests",
    "good_ratio",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "hit_ratio",
)
_WIDE_RANGE = 20
"""From here on an axis is logarithmic."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.warning { background: #fff1d6; border-left: 4px solid #d98a00; padding: .5rem 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; }
table { border-collapse: collapse; } td { padding: .15rem 1rem .15rem 0; border-bottom: 1px solid #e4e8ee; }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
"""


def render(title: str, summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> str:
    """The page. `summary` is that of `report.py`."""
    warning = ""
    if summary.get("client_is_bottleneck"):
        warning = '<p class="warning">The client had too much to do: these figures are its own, not the server\'s.</p>'
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shown(value))}</td></tr>"
        for name, value in summary.items()
        if not isinstance(value, list | dict)
    )
    stages = summary.get("stages", ())
    if stages:
        names = "".join(f"<td>{name}</td>" for name in _STAGE_COLUMNS)
        rows += f"</table><h2>Rate by rate</h2><table><tr>{names}</tr>"
        for stage in stages:
            rows += "<tr>" + "".join(f"<td>{_shown(stage.get(name))}</td>" for name in _STAGE_COLUMNS) + "</tr>"
        title += f", plots of {stages[-1]['rate']:g} sessions/s"
    plots = "".join(f'<figure class="plot">{svg}</figure>' for svg in _plots(records))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>{warning}"
        f'<div class="plots">{plots}</div><h2>Figures</h2><table>{rows}</table></html>\n'
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _plots(records: Sequence[RequestRecord]) -> list[str]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    good = [record for record in records if record.error is None]
    panels: list[Callable[[Axes], None]] = [
        lambda axes: _distribution(axes, "time to first token", [record.ttft_s for record in good]),
        lambda axes: _distribution(axes, "gap between pieces", [gap for record in good for gap in record.gaps_s]),
        lambda axes: _over_time(axes, records),
        lambda axes: _running(axes, records),
    ]
    plots = []
    for draw in panels:
        figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
        draw(axes)
        axes.grid(alpha=0.25)
        with io.StringIO() as svg:
            figure.savefig(svg, format="svg")
            plots.append(svg.getvalue()[svg.getvalue().index("<svg") :])
        plt.close(figure)
    return plots


def _distribution(axes: "Axes", what: str, seconds: Sequence[float]) -> None:
    axes.set_title(what)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of all that took at most so long")
    if seconds:
        values = np.sort(np.asarray(seconds)) * 1e3
        shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), 500)).astype(int))
        axes.plot(values[shown], (shown + 1) / len(values))
        if values[-1] > _WIDE_RANGE * values[0] > 0:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")


def _over_time(axes: "Axes", records: Sequence[RequestRecord]) -> None:
    axes.set_title("time to first token over the test")
    axes.set_xlabel("s since the start, when it was due")
    axes.set_ylabel("ms")
    good = [record for record in records if record.error is None]
    bad = [record for record in records if record.error is not None]
    axes.plot([r.intended_s for r in good], [r.ttft_s * 1e3 for r in good], ".", markersize=3, label="succeeded")
    if bad:
        axes.plot([r.intended_s for r in bad], [0.0] * len(bad), "x", color="tab:red", label="failed")
        axes.legend()


def _running(axes: "Axes", records: Sequence[RequestRecord]) -> None:
    axes.set_title("requests under way")
    axes.set_xlabel("s since the start")
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    if changes:
        times, steps = zip(*changes, strict=True)
        axes.step(times, np.cumsum(steps), where="post")
