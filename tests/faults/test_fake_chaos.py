"""A cluster of fake workers loses processes, connections and its directory again and again, and nobody notices.

`make chaos` does the same for longer.
"""

from pathlib import Path

from chaos_plan import ChaosPlan, FaultKind
from fake_chaos import run_fake_chaos
from fake_cluster import ClusterShape, fake_cluster
from fake_load import under_load
from leaks import NO_BASELINE, leaks_after_rest

from pagoda.worker.tokenizer import Tokenizer

SHAPE = ClusterShape(num_workers=6, step_s=0.01, notice_s=0.2, replace_s=0.2, reservation_s=3.0)
DEADLINE_S = 60.0
MIX = {
    FaultKind.KILL_WORKER: 0.5,
    FaultKind.PAUSE_WORKER: 2.0,
    FaultKind.CUT_DIRECTORY: 2.5,
    FaultKind.KILL_DIRECTORY: 3.5,
    FaultKind.SLOW_DIRECTORY: 4.0,
    FaultKind.MUTE_DIRECTORY: 5.0,
    FaultKind.JUMP_CLOCK: 3.0,
}


async def test_nothing_is_lost(fake_model: Path) -> None:
    """Two kills a second, and whatever else may happen: every answer is whole and right, and nothing is left behind."""
    plan = ChaosPlan(1, 7.0, MIX)
    outcome = await run_fake_chaos(fake_model, SHAPE, plan, num_clients=12)
    assert outcome.counts.failed == []
    assert outcome.counts.wrong == []
    assert outcome.leaks.is_clean, outcome.leaks
    assert outcome.num_kills > 10
    assert outcome.num_deaths >= outcome.num_kills
    assert outcome.counts.num_requests - outcome.counts.num_left - outcome.counts.num_refused > 20


async def test_all_workers_at_once(fake_model: Path) -> None:
    """Scenario: every worker dies in the same moment. Whoever was being answered waits for the next ones."""
    async with fake_cluster(fake_model, SHAPE) as cluster:
        async with under_load(cluster.service, Tokenizer(fake_model), num_clients=8) as load:
            await load.until(lambda: load.counts.num_tokens > 200)
            for worker in cluster.ready:
                await worker.close()
            num_before = load.counts.num_tokens
            await load.until(lambda: load.counts.num_tokens > num_before + 200)
        assert load.counts.failed == []
        assert load.counts.wrong == []
        assert cluster.num_deaths >= SHAPE.num_workers
        leaks = await leaks_after_rest(cluster, NO_BASELINE, deadline_s=DEADLINE_S)
        assert leaks.is_clean, leaks
