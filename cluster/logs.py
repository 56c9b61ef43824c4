"""Where the log lines of replica processes go: into Ray Serve's own log files, one for each process.

Serve gives its logger a file and leaves the root logger alone; and what a replica writes to its standard error goes
through Serve's logger at level info, which Serve's own level cuts off.
"""

import logging
from typing import Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

_OURS = "pagoda"
_SERVES = "ray.serve"


class _ThroughServe(logging.Handler):
    """Hands records to whatever handlers Serve's logger has at that time; Serve may replace them."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(_SERVES).handle(record)


def log_through_serve(level: LogLevel) -> None:
    """From now on our own records of `level` and above go where Serve's go, in this process."""
    ours = logging.getLogger(_OURS)
    ours.setLevel(level.upper())
    ours.propagate = False
    ours.handlers = [_ThroughServe()]
