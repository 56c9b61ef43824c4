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
from pagoda.cluster.ingress.request_id import request_id_headers
from pagoda.cluster.ingress.tenant_registry import NotAllowedError, UnauthenticatedError
from pagoda.worker.errors import EngineStoppedError, InvalidRequestError, OverloadedError, PagodaError

logger = logging.getLogger(__name__)

ERRORS = (ValidationError, HTTPException, ClientDisconnect, PagodaError, Exception)
"""What `answer_error` is registered for."""
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499


class UnknownModelError(InvalidRequestError):
    """The request asks for a model that is not served here."""


async def answer_error(http: HttpRequest, error: Exception) -> Response:
    """The whole answer, as long as none has begun."""
    status, body = describe(error)
    headers = request_id_headers(http)
    if isinstance(error, HTTPException):
        headers = headers | dict(error.headers or {})
    if status in (429, 503):
        headers = headers | {"Retry-After": str(RETRY_AFTER_S)}
    return JSONResponse(body, status_code=status, headers=headers)


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error. One that nobody foresaw goes into the log, and only there."""
    invalid = "invalid_request_error"
    match error:
        case ValidationError():
            param, message = first_problem(error.errors(include_url=False, include_input=False))
            return 400, error_body(message, kind=invalid, param=param)
        case UnknownModelError():
            return 404, error_body(str(error), kind=invalid, param=error.field, code="model_not_found")
        case InvalidRequestError():
            return 400, error_body(str(error), kind=invalid, param=error.field)
        case UnauthenticatedError():
            return 401, error_body(str(error), kind=invalid, code="invalid_api_key")
        case NotAllowedError():
            return 403, error_body(str(error), kind=invalid, code="insufficient_permissions")
        case OverloadedError():
            return 429, error_body(str(error), kind="rate_limit_error", code="overloaded")
        case EngineStoppedError():
            return 503, error_body(str(error), kind="server_error", code="unavailable")
        case PagodaError():
            return 500, error_body(str(error), kind="server_error")
        case ClientDisconnect():
            return CLIENT_CLOSED_REQUEST, error_body("the client went away", kind=invalid)
        case HTTPException():
            return error.status_code, error_body(str(error.detail), kind=invalid)
        case _:
            logger.error("unexpected error", exc_info=error)
            return 500, error_body("internal error", kind="server_error")
