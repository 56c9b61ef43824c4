"""Workers behind a cable that is pulled: no connection breaks, and nothing arrives."""

from pathlib import Path

import pytest
from fake_cluster import ClusterShape, Directory, FakeCluster, Nursery, fake_cluster
from fake_load import under_load
from leaks import NO_BASELINE, leaks_after_rest
from partition import Network, network
from tcp_proxy import TcpProxy

from pagoda.cluster.ingress import resuming_client, sessions
from pagoda.worker.tokenizer import Tokenizer

DEADLINE_S = 60.0
IMPATIENT = [
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
"""An ingress that notices in a second what it otherwise does in fifteen."""
SHAPE = ClusterShape(num_workers=3, step_s=0.01, reservation_s=3.0)


async def test_workers_behind_a_pulled_cable(fake_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: for a moment nothing that workers and ingress send each other arrives, and no connection breaks.

    The calls that run the requests stand, as when Serve's own take another way. The ingress gives its sessions up and
    goes on with the requests over new ones; the workers still have the old ones, where nobody reads any more.
    """
    monkeypatch.setattr(sessions, "_KEEPALIVE", IMPATIENT)
    monkeypatch.setattr(resuming_client, "LAST_TOKENS_S", 1.0)
    try:
        with network() as cut_off:
            await _pull_and_plug(fake_model, cut_off)
    except PermissionError as error:
        pytest.skip(f"no network namespace may be made: {error}")


async def _pull_and_plug(model: Path, cut_off: Network) -> None:
    proxies: list[TcpProxy] = []

    async def on_their_side(directory: Directory) -> str:
        proxies.append(TcpProxy(directory.address))
        return await proxies[0].start(cut_off.our_address)

    nursery = Nursery(cut_off.command)
    async with fake_cluster(
        model, SHAPE, nursed_by=nursery, host=cut_off.their_address, directory_address=on_their_side
    ) as cluster:
        async with under_load(cluster.service, Tokenizer(model), num_clients=8) as load:
            await load.until(lambda: load.counts.num_tokens > 200)
            cut_off.pull()
            await load.until(lambda: _num_lost(cluster) == SHAPE.num_workers)
            cut_off.plug()
            num_before = load.counts.num_tokens
            await load.until(lambda: load.counts.num_tokens > num_before + 200)
        assert load.counts.failed == []
        assert load.counts.wrong == []
        assert cluster.num_deaths == 0
        leaks = await leaks_after_rest(cluster, NO_BASELINE, deadline_s=DEADLINE_S)
        assert leaks.is_clean, leaks
    await proxies[0].close()


def _num_lost(cluster: FakeCluster) -> int:
    """Workers to which there is no session."""
    return sum(cluster.known.is_lost(each.endpoint.boot_id) for each in cluster.ready if each.endpoint is not None)
