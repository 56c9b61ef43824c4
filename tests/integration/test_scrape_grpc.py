"""Scraping workers over gRPC on loopback: every worker that answers is in, the others are counted and delay nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from local_server import DEADLINE_S

from pagoda.cluster.ingress import sessions as sessions_module
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.sessions import WorkerEndpoint, WorkerSessions
from pagoda.proto import metrics_pb2, metrics_pb2_grpc
from pagoda.worker.metrics import WorkerMetrics
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.server import WorkerServer


def measured(name: str) -> Any:
    """As much of an engine as a scrape needs."""
    metrics = WorkerMetrics(worker=name)
    return SimpleNamespace(metrics_exposition=lambda: metrics.exposition(SchedulerStats(num_running=3)))


@asynccontextmanager
async def workers(*names: str) -> AsyncIterator[tuple[WorkerSessions, list[WorkerServer]]]:
    """Workers of these names, and sessions with all of them."""
    servers = [WorkerServer(measured(name), token="secret") for name in names]
    addresses = [await server.start("127.0.0.1") for server in servers]
    sessions = WorkerSessions("ingress", token="secret")
    sessions.set_routable([WorkerEndpoint(*pair) for pair in zip(addresses, names, strict=True)])
    try:
        await until(lambda: len(sessions._channels) == len(names))
        yield sessions, servers
    finally:
        await sessions.shutdown()
        for server in servers:
            await server.stop()


async def until(is_so: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(0.001)


def running(answers: list[str | None]) -> list[str]:
    """Which workers an ingress shows."""
    lines = IngressMetrics(ingress="i").exposition(answers).splitlines()
    return sorted(line for line in lines if line.startswith("pagoda_num_requests_running{"))


async def test_all_workers_are_scraped() -> None:
    async with workers("a", "b", "c") as (sessions, _):
        answers = await sessions.scrape()
    assert running(answers) == [f'pagoda_num_requests_running{{worker="{name}"}} 3.0' for name in "abc"]


async def test_dead_worker_is_left_out_and_counted() -> None:
    async with workers("a", "b") as (sessions, servers):
        await servers[0].stop()
        answers = await sessions.scrape()
        assert sorted(answer is None for answer in answers) == [False, True]
        assert len(running(answers)) == 1
    shown = IngressMetrics(ingress="i").exposition(answers)
    assert 'pagoda_worker_scrape_failures_total{ingress="i"} 1.0' in shown


async def test_worker_that_does_not_answer_delays_by_the_deadline_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, say: the connection stands and nothing comes."""
    monkeypatch.setattr(sessions_module, "_SCRAPE_DEADLINE_S", 1.0)
    async with workers("a", "b") as (sessions, servers):

        async def hang(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(servers[0]._token, "check", hang)
        async with asyncio.timeout(DEADLINE_S):
            answers = await sessions.scrape()
    assert sorted(answer is None for answer in answers) == [False, True]


async def test_session_that_ends_during_a_scrape_is_a_worker_without_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel closes under the call, which must not look as if the scrape had been cancelled."""
    async with workers("a") as (sessions, servers):
        is_asked, go_on = asyncio.Event(), asyncio.Event()
        check = servers[0]._token.check

        async def wait(context: Any) -> None:
            is_asked.set()
            await go_on.wait()
            await check(context)

        monkeypatch.setattr(servers[0]._token, "check", wait)
        scraping = asyncio.create_task(sessions.scrape())
        await is_asked.wait()
        await sessions.shutdown()
        assert await asyncio.wait_for(scraping, DEADLINE_S) == [None]
        go_on.set()


async def test_cancelled_scrape_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers("a") as (sessions, servers):
        is_asked = asyncio.Event()

        async def hang(*_: object) -> None:
            is_asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(servers[0]._token, "check", hang)
        scraping = asyncio.create_task(sessions.scrape())
        await is_asked.wait()
        scraping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scraping


async def test_idle_session_survives_its_keepalive_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to send for half a minute, sessions ended with "too many pings", and what ran over them was lost.

    Here they ping every second, which ended them after five.
    """
    options = dict(sessions_module._KEEPALIVE) | {"grpc.keepalive_time_ms": 1000}
    monkeypatch.setattr(sessions_module, "_KEEPALIVE", list(options.items()))
    async with workers("a") as (sessions, _):
        (channel,) = sessions._channels.values()
        await asyncio.wait_for(channel.channel_ready(), DEADLINE_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 7.0)


async def test_no_workers() -> None:
    async with workers() as (sessions, _):
        assert await sessions.scrape() == []


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)])
async def test_token_is_needed(metadata: tuple[tuple[str, str], ...]) -> None:
    server = WorkerServer(measured("a"), token="secret")
    address = await server.start("127.0.0.1")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = metrics_pb2_grpc.WorkerMetricsStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Scrape(metrics_pb2.ScrapeRequest(), metadata=metadata, timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop()
