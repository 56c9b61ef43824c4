"""What HTTP clients get for every error: its status and a body as OpenAI clients expect it."""

import logging
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagoda.cluster.ingress.error_body import error_body
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.refusals import retry_after_s
from pagoda.cluster.ingress.request_id import request_id_headers
from pagoda.cluster.ingress.tenant_limits import TenantLimitError
from pagoda.cluster.ingress.tenant_registry import NotAllowedError, UnauthenticatedError
from pagoda.worker.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
)

logger = logging.getLogger(__name__)

ERRORS = (ValidationError, HTTPException, ClientDisconnect, PagodaError, Exception)
"""What `answer_error` is registered for."""
CLIENT_CLOSED_REQUEST = 499
_INVALID = "invalid_request_error"


class UnknownModelError(InvalidRequestError):
    """The request asks for a model that is not served here."""


async def answer_error(http: HttpRequest, error: Exception) -> Response:
    """The whole answer, as long as none has begun."""
    status, body = describe(error)
    headers = request_id_headers(http)
    if isinstance(error, HTTPException):
        headers = headers | dict(error.headers or {})
    if status in (429, 503):
        headers = headers | {"Retry-After": str(retry_after_s(error))}
    return JSONResponse(body, status_code=status, headers=headers)


_KINDS: tuple[tuple[type[PagodaError], int, str, str | None], ...] = (
    (TenantLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (UnauthenticatedError, 401, _INVALID, "invalid_api_key"),
    (NotAllowedError, 403, _INVALID, "insufficient_permissions"),
    (DeadlineExceededError, 504, "server_error", "deadline_exceeded"),
    (EngineStoppedError, 503, "server_error", "unavailable"),
    (PagodaError, 500, "server_error", None),
)
"""Of our own errors the first that fits: status, type and code."""


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error. One that nobody foresaw goes into the log, and only there."""
    match error:
        case ValidationError():
            param, message = first_problem(error.errors(include_url=False, include_input=False))
            return 400, error_body(message, kind=_INVALID, param=param)
        case UnknownModelError():
            return 404, error_body(str(error), kind=_INVALID, param=error.field, code="model_not_found")
        case InvalidRequestError():
            return 400, error_body(str(error), kind=_INVALID, param=error.field)
        case PagodaError():
            _, status, kind, code = next(entry for entry in _KINDS if isinstance(error, entry[0]))
            return status, error_body(str(error), kind=kind, code=code)
        case ClientDisconnect():
            return CLIENT_CLOSED_REQUEST, error_body("the client went away", kind=_INVALID)
        case HTTPException():
            return error.status_code, error_body(str(error.detail), kind=_INVALID)
        case _:
            logger.error("unexpected error", exc_info=error)
            return 500, error_body("internal error", kind="server_error")
