"""One line and one count for each gRPC call, however it ends."""

import asyncio
import logging
from collections.abc import Iterator

import grpc
import pytest
from test_request_log import Clock

from pagoda.cluster.ingress.generation import GenerationFailedError, RequestAbortedError
from pagoda.cluster.ingress.grpc_errors import status_of
from pagoda.cluster.ingress.grpc_log import GrpcLog
from pagoda.cluster.ingress.live_requests import DrainingError
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.request_log import AnswerCounts
from pagoda.worker.errors import InvalidRequestError, OverloadedError, PagodaError
from pagoda.worker.quoting import MAX_MESSAGE


@pytest.fixture
def metrics() -> IngressMetrics:
    return IngressMetrics(ingress="i")


@pytest.fixture
def log(metrics: IngressMetrics, caplog: pytest.LogCaptureFixture) -> Iterator[GrpcLog]:
    with caplog.at_level(logging.INFO, logger="pagoda"):
        yield GrpcLog(metrics, clock=Clock())


def counted(metrics: IngressMetrics) -> list[str]:
    return [line for line in metrics.exposition([]).splitlines() if line.startswith("pagoda_grpc")]


def test_line_of_an_answer(log: GrpcLog, metrics: IngressMetrics, caplog: pytest.LogCaptureFixture) -> None:
    with log.call("Generate", None) as record:
        record.follow(lambda: AnswerCounts("job-1", 30, 16, 7, ["stop", None]))
        record.tokens_arrive()
        record.tokens_arrive()
    (line,) = caplog.messages
    assert line == (
        "Generate OK id=job-1 prompt=30 cached=16 output=7 ttft_ms=1000.0 duration_ms=2000.0 finish=stop,unfinished"
    )
    assert counted(metrics) == ['pagoda_grpc_requests_total{code="OK",ingress="i",method="Generate"} 1.0']


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("n", "must be 1"), "INVALID_ARGUMENT"),
        (InvalidRequestError("model", "unknown"), "NOT_FOUND"),
        (OverloadedError("busy"), "RESOURCE_EXHAUSTED"),
        (RequestAbortedError("aborted"), "ABORTED"),
        (DrainingError("stopping"), "UNAVAILABLE"),
        (GenerationFailedError("failed"), "INTERNAL"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (RuntimeError("a bug"), "INTERNAL"),
    ],
)
def test_code_is_how_the_call_ended(
    log: GrpcLog, metrics: IngressMetrics, caplog: pytest.LogCaptureFixture, error: BaseException, code: str
) -> None:
    """And is the one that the client gets; the error goes on to whoever answers for it."""
    with pytest.raises(type(error)), log.call("Chat", None):
        raise error
    assert caplog.messages == [f"Chat {code} duration_ms=1000.0"]
    assert [record.exc_info for record in caplog.records] == [None]
    assert counted(metrics) == [f'pagoda_grpc_requests_total{{code="{code}",ingress="i",method="Chat"}} 1.0']
    if isinstance(error, PagodaError):
        assert status_of(error).code is grpc.StatusCode[code]
        assert status_of(error).details == str(error)


def test_long_details_are_cut() -> None:
    """They are a header: too long, and the call would end with a status that says nothing."""
    details = status_of(InvalidRequestError("model", "\U0001f642" * 100_000 + " is unknown")).details
    assert details.startswith("model: ")
    assert details.endswith(" is unknown")
    assert len(details) == MAX_MESSAGE


def test_probes_show_at_debug(log: GrpcLog, metrics: IngressMetrics, caplog: pytest.LogCaptureFixture) -> None:
    with log.call("Check", None):
        pass
    assert (caplog.messages, len(counted(metrics))) == ([], 1)
    with caplog.at_level(logging.DEBUG, logger="pagoda"), log.call("Watch", None):
        pass
    assert caplog.messages == ["Watch OK duration_ms=1000.0"]
