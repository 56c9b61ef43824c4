"""Counts every HTTP request and logs one line for it, when all of its answer is sent.

At level info, or at debug if it is a probe that comes every few seconds:

    POST /v1/chat/completions 200 id=chatcmpl-... prompt=31 cached=16 output=40 ttft_ms=18.2 duration_ms=402.0
        finish=stop,length
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.worker.quoting import quoted

logger = logging.getLogger(__name__)

PROBES = ("/health", "/metrics")
_CLIENT_CLOSED_REQUEST = 499
_NO_ROUTE = "other"


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """How far the answer to a generation request has come."""

    answer_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: Sequence[str | None]
    """Of each choice; None while it is not finished."""


class RequestRecord:
    """What is known of one HTTP request or gRPC call. Endpoints that generate tell it of their answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = clock()
        self._first_token_at: float | None = None
        self._counts: Callable[[], AnswerCounts] | None = None
        self.status: int | None = None

    def follow(self, counts: Callable[[], AnswerCounts]) -> None:
        """The request is good, and `counts` says how far its answer is."""
        self._counts = counts

    def tokens_arrive(self) -> None:
        """The first time is remembered."""
        if self._first_token_at is None:
            self._first_token_at = self._clock()

    def line(self, head: str) -> str:
        """`head` says what was asked for, and how that ended."""
        fields = [head]
        duration = f"duration_ms={(self._clock() - self._begin) * 1e3:.1f}"
        if self._counts is None:
            return f"{head} {duration}"
        counts = self._counts()
        fields += [
            f"id={counts.answer_id}",
            f"prompt={counts.num_prompt_tokens}",
            f"cached={counts.num_cached_tokens}",
            f"output={counts.num_output_tokens}",
        ]
        if self._first_token_at is not None:
            fields.append(f"ttft_ms={(self._first_token_at - self._begin) * 1e3:.1f}")
        reasons = dict.fromkeys(reason or "unfinished" for reason in counts.finish_reasons)
        return " ".join([*fields, duration, f"finish={','.join(reasons)}"])


def record_of(http: HttpRequest) -> RequestRecord:
    record: RequestRecord = http.scope["state"]["record"]
    return record


class RequestLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, metrics: IngressMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope.setdefault("state", {})["record"] = RequestRecord(self._clock)

        async def send_and_look(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        status = _CLIENT_CLOSED_REQUEST
        try:
            await self._app(scope, receive, send_and_look)
        except Exception:
            status = 500  # what the server answers to an error that nobody foresaw
            raise
        finally:
            self._end(scope, record, record.status or status)

    def _end(self, scope: Scope, record: RequestRecord, status: int) -> None:
        path = _path_of(scope)
        self._metrics.request_ends(path, status)
        level = logging.DEBUG if path in PROBES else logging.INFO
        if logger.isEnabledFor(level):
            # A path that no route knows may hold anything, line breaks too.
            shown = path if path != _NO_ROUTE else quoted(scope["path"])
            logger.log(level, "%s", record.line(f"{scope['method']} {shown} {status}"))


def _path_of(scope: Scope) -> str:
    """Of the route, also of a request that was refused on the way there."""
    route = scope.get("route")
    if route is None and "app" in scope:
        routes = scope["app"].router.routes
        route = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return getattr(route, "path", _NO_ROUTE)
