"""Where the log lines of replica processes go: into Ray Serve's own log files, one for each process.

Serve gives its logger a file and leaves the root logger alone; and what a replica writes to its standard error goes
through Serve's logger at level info, which Serve's own level cuts off.

Serve writes a stack trace when a client leaves a gRPC stream between two messages, and a warning for every request that
finds no room. Neither is a failure, and the request's own line tells of it.
"""

import asyncio
import logging
from typing import Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

_OURS = "pagoda"
_SERVES = "ray.serve"
_REFUSAL = "Request dropped due to backpressure"


class _ThroughServe(logging.Handler):
    """Hands records to whatever handlers Serve's logger has at that time; Serve may replace them."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(_SERVES).handle(record)


def _tells_of_failures(record: logging.LogRecord) -> bool:
    """A filter."""
    error = record.exc_info[1] if record.exc_info else None
    is_refusal = _REFUSAL in str(record.msg)
    return not is_refusal and not isinstance(error, GeneratorExit | asyncio.CancelledError)


def log_through_serve(level: LogLevel) -> None:
    """From now on our own records of `level` and above go where Serve's go, in this process."""
    ours = logging.getLogger(_OURS)
    ours.setLevel(level.upper())
    ours.propagate = False
    ours.handlers = [_ThroughServe()]
    logging.getLogger(_SERVES).addFilter(_tells_of_failures)  # once, however often
