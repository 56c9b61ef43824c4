"""Why requests are refused that could be served at another time, and when to try again."""

import math
from collections.abc import Callable

from pagoda.cluster.ingress.tenant_limits import TenantLimitError
from pagoda.worker.errors import OverloadedError, PagodaError

REASONS = ("concurrency", "request_rate", "token_rate", "overloaded", "unavailable")
"""Of a tenant's limits the first three; there is too much to do; there is no worker, or the service stops."""
OnRefused = Callable[[str], None]
"""Takes one of `REASONS`."""
_LEAST_S, _MOST_S = 1, 3600


def refusal_reason(error: PagodaError) -> str:
    """One of `REASONS`."""
    if isinstance(error, TenantLimitError):
        return error.reason
    return "overloaded" if isinstance(error, OverloadedError) else "unavailable"


def retry_after_s(error: Exception) -> int:
    """In how many whole seconds it may be worth trying again: as measured, or else the least."""
    seconds = error.retry_after_s if isinstance(error, OverloadedError) else None
    return min(_MOST_S, max(_LEAST_S, math.ceil(seconds or 0)))
