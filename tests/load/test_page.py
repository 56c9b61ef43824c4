"""The page of a load test, looked at by a browser. Skipped where there is none: `apt install chromium`."""

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import pytest

from pagoda.cluster.loadtest import report
from pagoda.cluster.loadtest.html import render
from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.runner import LoadResult

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LINE_BLUE = (31, 119, 180)
"""matplotlib's first colour."""


def records() -> list[RequestRecord]:
    good = [
        RequestRecord(i, 0, i * 0.1, i * 0.1, i * 0.1 + 0.2 + i * 0.01, i * 0.1 + 2, (0.05, 0.07), 10, 4, 3)
        for i in range(50)
    ]
    return [*good, RequestRecord(99, 0, 2.0, 2.0, None, 3.0, error="timeout", detail="<script>alert(1)</script>")]


def page(tmp_path: Path, title: str = "a <b>test</b>") -> Path:
    summary = report.summarize(LoadResult(records(), {}, 10.0, 0.95), report.Slo())
    path = tmp_path / "load.html"
    path.write_text(render(title, summary, records()))
    return path


def test_what_others_wrote_is_no_markup(tmp_path: Path) -> None:
    text = page(tmp_path).read_text()
    assert "a &lt;b&gt;test&lt;/b&gt;" in text
    assert "<script" not in text
    assert "had too much to do" in text


def test_rate_by_rate(tmp_path: Path) -> None:
    summary = report.summarize(LoadResult(records(), {}, 10.0, 0.1), report.Slo())
    path = tmp_path / "load.html"
    path.write_text(render("ramp", {"knee_rate": 2.0, "stages": [{"rate": 2.0, **summary}]}, records()))
    assert "plots of 2 sessions/s" in path.read_text()
    assert "<td>ttft_p99_ms</td>" in path.read_text()


def test_nothing_to_show(tmp_path: Path) -> None:
    summary = report.summarize(LoadResult([], {}, 0.0, 0.0), report.Slo())
    path = tmp_path / "load.html"
    path.write_text(render("nothing", summary, []))
    assert path.read_text().count("<svg") == 4


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_shows_its_plots(tmp_path: Path) -> None:
    assert BROWSER is not None
    picture = tmp_path / "page.png"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,900",
    ]  # fmt: skip
    url = page(tmp_path).as_uri()
    dom = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, check=True, timeout=120).stdout
    assert len(re.findall("<svg", dom)) == 4
    assert "failed_timeout" in dom
    subprocess.run([*command, f"--screenshot={picture}", url], capture_output=True, check=True, timeout=120)
    pixels = (matplotlib.image.imread(picture)[:, :, :3] * 255).round()
    is_line = (abs(pixels - LINE_BLUE) < 60).all(axis=2)
    halves = [is_line[:, :550], is_line[:, 550:]]
    assert all(half[:400].sum() > 100 and half[400:].sum() > 100 for half in halves)  # a plot in each corner
