"""One line and one count for each request, whatever becomes of it."""

import logging
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.request_log import AnswerCounts, RequestLog, record_of


class Clock:
    """One second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Route:
    def __init__(self, path: str) -> None:
        self.path = path


async def run(app: ASGIApp, caplog: pytest.LogCaptureFixture, path: str = "/x", *, level: int = logging.INFO) -> Any:
    """Sends one request. Returns (log lines, counted series)."""
    caplog.set_level(level, logger="pagoda")
    metrics = IngressMetrics(ingress="i")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    try:
        await RequestLog(app, metrics=metrics, clock=Clock())(
            {"type": "http", "method": "POST", "path": path}, receive, send
        )
    finally:
        lines = [record.getMessage() for record in caplog.records]
        counted = [line for line in metrics.exposition([]).splitlines() if line.startswith("pagoda_http")]
    return lines, counted


def answering(status: int, *, route: str | None = "/x", counts: AnswerCounts | None = None) -> ASGIApp:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if route is not None:
            scope["route"] = Route(route)
        if counts is not None:
            record = record_of(HttpRequest(scope))
            record.follow(lambda: counts)
            record.tokens_arrive()
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    return app


async def test_line_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    counts = AnswerCounts("cmpl-1", 30, 16, 7, ["stop", "length", "stop", None])
    lines, counted = await run(answering(200, counts=counts), caplog)
    (line,) = lines
    assert line.startswith("POST /x 200 id=cmpl-1 prompt=30 cached=16 output=7 ttft_ms=1000.0 duration_ms=2000.0 ")
    assert line.endswith(" finish=stop,length,unfinished")
    assert counted == ['pagoda_http_requests_total{ingress="i",path="/x",status="200"} 1.0']


async def test_line_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    assert (await run(answering(400), caplog))[0] == ["POST /x 400 duration_ms=1000.0"]


async def test_path_without_a_route(caplog: pytest.LogCaptureFixture) -> None:
    """It shows in the log, where it cannot forge lines, and is no label."""
    lines, counted = await run(answering(404, route=None), caplog, "/a\nPOST /x 200")
    assert lines == ["POST '/a\\nPOST /x 200' 404 duration_ms=1000.0"]
    assert counted == ['pagoda_http_requests_total{ingress="i",path="other",status="404"} 1.0']


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_show_at_debug(caplog: pytest.LogCaptureFixture, path: str) -> None:
    lines, counted = await run(answering(200, route=path), caplog, path)
    assert (lines, len(counted)) == ([], 1)
    lines, _ = await run(answering(200, route=path), caplog, path, level=logging.DEBUG)
    assert lines == [f"POST {path} 200 duration_ms=1000.0"]


async def test_quiet_by_default(caplog: pytest.LogCaptureFixture) -> None:
    lines, counted = await run(answering(500), caplog, level=logging.WARNING)
    assert (lines, len(counted)) == ([], 1)


async def test_error_that_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    """It goes on to whoever answers for it, and counts as what the client gets."""

    async def app(*_: object) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError):
        await run(app, caplog)
    assert [record.getMessage() for record in caplog.records] == ["POST '/x' 500 duration_ms=1000.0"]


async def test_client_that_goes_before_there_is_a_status(caplog: pytest.LogCaptureFixture) -> None:
    async def app(*_: object) -> None:
        pass

    assert (await run(app, caplog))[0] == ["POST '/x' 499 duration_ms=1000.0"]


async def test_what_is_not_http_passes() -> None:
    seen = []

    async def app(scope: Scope, *_: object) -> None:
        seen.append(scope)

    await RequestLog(app, metrics=IngressMetrics(ingress="i"))({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]
