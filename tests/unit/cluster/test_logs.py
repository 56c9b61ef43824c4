"""Our records reach Serve's handlers, by our level and not by Serve's."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.logs import LOG_LEVELS, log_through_serve
from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import ConfigError


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def serves() -> Iterator[Collector]:
    """What stands for Serve's log file."""
    ours, serves, collector = logging.getLogger("pagoda"), logging.getLogger("ray.serve"), Collector()
    before = (ours.level, ours.propagate, ours.handlers, serves.level, serves.handlers)
    filters = list(serves.filters)
    serves.handlers = [collector]
    serves.setLevel(logging.WARNING)
    yield collector
    ours.level, ours.propagate, ours.handlers, serves.level, serves.handlers = before
    serves.filters = filters
    for logger in (ours, serves):
        logger.setLevel(logger.level)


def log_at_every_level() -> None:
    logger = logging.getLogger("pagoda.anything")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, logging.getLevelName(level))


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_records_of_the_level_and_above_go_through(serves: Collector, level: str) -> None:
    log_through_serve(level)  # type: ignore[arg-type]
    log_at_every_level()
    assert serves.lines == ["DEBUG", "INFO", "WARNING", "ERROR"][LOG_LEVELS.index(level) :]  # type: ignore[arg-type]


def test_once_is_enough(serves: Collector) -> None:
    """Two parts in one process do not double the lines."""
    log_through_serve("warning")
    log_through_serve("warning")
    log_at_every_level()
    assert serves.lines == ["WARNING", "ERROR"]


def test_handlers_that_serve_sets_later_get_them(serves: Collector) -> None:
    log_through_serve("info")
    later = Collector()
    logging.getLogger("ray.serve").handlers = [later]
    log_at_every_level()
    assert (serves.lines, later.lines) == ([], ["INFO", "WARNING", "ERROR"])


def test_quiet_is_the_default() -> None:
    assert ClusterConfig(EngineConfig(None), "m").log_level == "warning"  # type: ignore[arg-type]


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_level: must be one of debug, info, warning, error, got 'loud'"):
        ClusterConfig(EngineConfig(None), "m", log_level="loud")  # type: ignore[arg-type]


def test_one_port_for_both_protocols_is_refused() -> None:
    """Ray Serve would say so after seconds, in sixty lines."""
    with pytest.raises(ConfigError, match="grpc_port: 8000 is the HTTP port"):
        ClusterConfig(EngineConfig(None), "m", port=8000, grpc_port=8000)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaving", [GeneratorExit, asyncio.CancelledError])
def test_client_that_leaves_is_no_failure(serves: Collector, leaving: type[BaseException]) -> None:
    """Serve reports an open stream that is closed as an unexpected error; other errors stay."""
    log_through_serve("warning")
    for error in (leaving, ValueError):
        try:
            raise error
        except BaseException:
            logging.getLogger("ray.serve").exception("failed with %s", error.__name__)
    assert serves.lines == ["failed with ValueError"]


def test_request_that_finds_no_room_is_no_warning(serves: Collector) -> None:
    """In an overload Serve would write one for each."""
    log_through_serve("warning")
    for message in ("Request dropped due to backpressure (num_queued_requests=8)", "something else"):
        logging.getLogger("ray.serve").warning(message)
    assert serves.lines == ["something else"]
