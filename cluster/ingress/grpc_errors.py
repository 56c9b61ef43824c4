"""The gRPC status of every error, by its cause."""

from dataclasses import dataclass

import grpc

from pagoda.cluster.ingress.generation import RequestAbortedError
from pagoda.cluster.ingress.refusals import retry_after_s
from pagoda.cluster.ingress.tenant_registry import NotAllowedError, UnauthenticatedError
from pagoda.worker.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
)
from pagoda.worker.quoting import shortened


@dataclass(frozen=True, slots=True)
class GrpcStatus:
    """What a client gets for an error."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()
    """Trailing: when to try again, in seconds, where that may help."""


def status_of(error: PagodaError) -> GrpcStatus:
    """The status of an error. A name that is served nowhere is not found, whatever it names."""
    match error:
        case InvalidRequestError(field="model" | "service"):
            code = grpc.StatusCode.NOT_FOUND
        case InvalidRequestError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case UnauthenticatedError():
            code = grpc.StatusCode.UNAUTHENTICATED
        case NotAllowedError():
            code = grpc.StatusCode.PERMISSION_DENIED
        case OverloadedError():
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        case DeadlineExceededError():
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        case RequestAbortedError():
            code = grpc.StatusCode.ABORTED
        case EngineStoppedError():
            code = grpc.StatusCode.UNAVAILABLE
        case _:
            code = grpc.StatusCode.INTERNAL
    may_try_again = code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    metadata = (("retry-after", str(retry_after_s(error))),) if may_try_again else ()
    return GrpcStatus(code, shortened(str(error)), metadata)
