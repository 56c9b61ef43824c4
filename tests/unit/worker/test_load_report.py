"""What an engine tells of itself, on its own thread, in one piece."""

import time
from collections.abc import Iterator

import pytest
from engine_client import BLOCK_SIZE, Client

from pagoda.worker.kv_events import BlockStored


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    client.engine.start()
    yield client
    client.close()


def wait_until_told(client: Client, *names: str) -> None:
    """Of their ends."""
    deadline = time.monotonic() + 10.0
    while {name for report in client.reports for name in report.finished} < set(names):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_comes_and_goes_with_its_requests(client: Client) -> None:
    """Each request comes once and ends once, in that order; the last report says that nothing is left."""
    for name in ("a", "b", "c"):
        client.add(name, 10, max_tokens=9, n=2 if name == "b" else 1)
    client.engine.abort("c")
    wait_until_told(client, "a", "b", "c")
    told = [
        (kind, name) for r in client.reports for kind, names in (("+", r.admitted), ("-", r.finished)) for name in names
    ]
    assert sorted(told) == sorted((kind, name) for kind in "+-" for name in "abc")
    assert all(told.index(("+", name)) < told.index(("-", name)) for name in "abc")
    load = client.reports[-1].load
    assert (load.num_uncached_tokens, load.num_running, load.num_waiting) == (0, 0, 0)
    assert load.num_free_blocks == 64
    assert load.num_empty_blocks == 64 - client.scheduler.manager.pool.num_cached


def test_load_contains_what_was_admitted(client: Client) -> None:
    """In one report, so that nobody counts a request twice or not at all."""
    client.executor.gate.clear()
    client.add("a", 40, max_tokens=4)
    assert client.executor.at_gate.wait(10.0)
    for name in ("b", "c"):
        client.add(name, 40, max_tokens=4)
    client.executor.gate.set()
    wait_until_told(client, "a", "b", "c")
    (report,) = (report for report in client.reports if "b" in report.admitted)
    assert list(report.admitted) == ["b", "c"]
    assert report.load.num_running + report.load.num_waiting == 3
    assert report.load.num_uncached_tokens > 0


def test_who_cannot_take_reports_ends_no_request(client: Client) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    assert client.engine._reporter is not None
    client.engine._reporter._on_report = fail
    client.add("a", 10, max_tokens=3)
    assert client.reason("a") is not None
    client.add("b", 10, max_tokens=3)
    assert len(client.tokens("b")) <= 3
    assert client.reason("b") is not None
    assert client.engine.failure is None


def test_blocks_are_announced_after_their_step(client: Client) -> None:
    client.executor.gate.clear()
    client.add("a", 3 * BLOCK_SIZE, max_tokens=1)
    assert client.executor.at_gate.wait(10.0)
    assert not any(report.events for report in client.reports)
    client.executor.gate.set()
    wait_until_told(client, "a")
    events = [event for report in client.reports for event in report.events]
    assert all(isinstance(event, BlockStored) for event in events)
    assert sum(len(event.hashes) for event in events if isinstance(event, BlockStored)) == 3
