"""Every error has a status and a body as OpenAI clients expect it."""

import logging

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pagoda.cluster.ingress.error_body import error_body
from pagoda.cluster.ingress.generation import GenerationFailedError, RequestAbortedError
from pagoda.cluster.ingress.http_errors import UnknownModelError, describe
from pagoda.cluster.ingress.live_requests import DrainingError
from pagoda.worker.errors import InvalidRequestError, OverloadedError


def test_error_body() -> None:
    assert error_body("no", kind="server_error") == {
        "error": {"message": "no", "type": "server_error", "param": None, "code": None}
    }


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (InvalidRequestError("n", "must be 1"), 400, "n", None),
        (UnknownModelError("model", "unknown"), 404, "model", "model_not_found"),
        (OverloadedError("busy"), 429, None, "overloaded"),
        (DrainingError("stopping"), 503, None, "unavailable"),
        (RequestAbortedError("aborted"), 503, None, "unavailable"),
        (GenerationFailedError("failed"), 500, None, None),
        (ClientDisconnect(), 499, None, None),
        (HTTPException(405), 405, None, None),
    ],
)
def test_status_is_by_the_cause(
    error: Exception, status: int, param: str | None, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found, body = describe(error)
    assert (found, body["error"]["param"], body["error"]["code"]) == (status, param, code)
    assert body["error"]["message"]
    assert not caplog.records


def test_error_that_nobody_foresaw_tells_the_log_and_not_the_client(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("a secret")
    status, body = describe(error)
    assert (status, body["error"]["message"]) == (500, "internal error")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is error
