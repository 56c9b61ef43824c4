"""What comes of a worker that is asked for more than it can: build/bench/overload.json.

Engines in this process that compute no model, with real threads and clocks, behind the ingress's service. Arrivals are
random, the same in each run, and nobody who is refused tries again. Capacity is what a closed loop gets; two tenants'
shares are half of it each. All figures are ratios of one run.

    goodput_at_3x_over_peak     requests a second that met the targets (first token, end) at three times the capacity,
                                over the most of all loads. The engine begins with nothing that has waited for too
                                long, and each request has its target as deadline
    ..._with_deadlines_only     the same of requests that may wait for as long as they can still be in time
    ..._without_deadlines       the same of requests that may take any time
    victim_ttft_p90_ratio       of a tenant that uses half of its share while another one asks for ten times its own,
                                over the same while the other one asks for its share
    ..._of_one_tenant           the same if both are one tenant
    ..._at_four_fifths          both ask for four fifths of their shares, then one for ten times as much
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from pagoda.cluster.ingress.local import LocalWorkerClient
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.tenants import Tenant
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda.worker.errors import DeadlineExceededError, OverloadedError
from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import SamplingParams

OUTPUT = Path("build/bench/overload.json")
STEP_S, TOKEN_S = 0.01, 0.0001
MAX_NUM_SEQS, MAX_NUM_WAITING = 16, 128
MAX_WAIT_S = 1.5
PROMPT_TOKENS, OUTPUT_TOKENS = (50, 350), (10, 90)
"""From, to."""
TTFT_TARGET_S, TOTAL_TARGET_S = 2.0, 4.0
LOADS = (0.5, 1.0, 2.0, 3.0)
VICTIMS = {
    "two tenants": (0.25, 0.5, ("flood", "victim")),
    "two tenants, at four fifths": (0.4, 0.4, ("flood", "victim")),
    "one tenant": (0.25, 0.5, ("one", "one")),
}
"""Of the capacity, what the victim asks for, and what the other one does before it floods; and what they are called."""
FLOOD = 10.0
VICTIM_RUNS = 3
"""Loads' lengths that a flood takes: a percentile of some dozen requests says little."""
WARM_S = 4.0
"""At the beginning of each load, which does not count."""


@dataclass(slots=True)
class Outcome:
    """Of one request; seconds since it was sent."""

    sent_s: float
    ttft_s: float | None = None
    total_s: float | None = None
    """None: it was refused, or its time was over."""
    is_refused: bool = False

    @property
    def is_good(self) -> bool:
        return (
            self.ttft_s is not None
            and self.total_s is not None
            and self.ttft_s <= TTFT_TARGET_S
            and self.total_s <= TOTAL_TARGET_S
        )


@dataclass(slots=True)
class Load:
    """One tenant's requests."""

    name: str
    """Loads of one name come at the same times in every run, if at the same rate."""
    tenant: Tenant
    per_s: float
    timeout_s: float | None
    outcomes: list[Outcome] = field(default_factory=list)

    def after_warming(self, begin_s: float) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.sent_s >= begin_s + WARM_S]


class Bench:
    """A service over a fake engine."""

    def __init__(self, seed: int, max_wait_s: float | None) -> None:
        folder = ModelStore(DEFAULT_STORE).fetch(DEFAULT_MODEL, progress=lambda *_: None)
        config = EngineConfig(
            folder,
            device="cpu",
            fake_step_s=STEP_S,
            fake_token_s=TOKEN_S,
            max_model_len=1024,
            cache=CacheConfig(num_blocks=1024),
            scheduler=SchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS, max_num_waiting=MAX_NUM_WAITING, max_wait_s=max_wait_s
            ),
        )
        self.engine = AsyncEngine(config, progress=lambda *_: None)
        self._service = InferenceService(Tokenizer(folder), LocalWorkerClient(self.engine), self.engine.limits)
        self._seed = seed

    async def send(
        self, source: random.Random, tenant: Tenant, timeout_s: float | None, outcomes: list[Outcome]
    ) -> None:
        prompt = [source.randrange(1000, 40_000) for _ in range(source.randint(*PROMPT_TOKENS))]
        sampling = SamplingParams(max_tokens=source.randint(*OUTPUT_TOKENS), ignore_eos=True, temperature=0.0)
        outcome = Outcome(time.monotonic())
        outcomes.append(outcome)
        generation = self._service.generate(prompt, sampling, tenant=tenant, deadline=self._service.deadline(timeout_s))
        try:
            async for _ in generation.outputs:
                if outcome.ttft_s is None:
                    outcome.ttft_s = time.monotonic() - outcome.sent_s
            outcome.total_s = time.monotonic() - outcome.sent_s
        except OverloadedError:
            outcome.is_refused = True
        except DeadlineExceededError:
            pass

    async def capacity(self, duration_s: float) -> float:
        """Requests a second when there are always more than may run."""
        outcomes: list[Outcome] = []
        source = random.Random(self._seed)
        end_s = time.monotonic() + WARM_S + duration_s

        async def client() -> None:
            while time.monotonic() < end_s:
                await self.send(source, Tenant("capacity"), None, outcomes)

        await asyncio.gather(*(client() for _ in range(2 * MAX_NUM_SEQS)))
        ended = [o.sent_s + o.total_s for o in outcomes if o.total_s is not None]
        return sum(end_s - duration_s <= at_s < end_s for at_s in ended) / duration_s

    async def run(self, loads: list[Load], duration_s: float) -> float:
        """Send all of them for so long, and wait until all have ended. Returns when it began."""
        begin_s = time.monotonic()
        tasks: list[asyncio.Task[None]] = []

        async def arrivals(load: Load) -> None:
            times, contents = random.Random(f"{self._seed} {load.name}"), random.Random(time.monotonic_ns())
            due_s = begin_s
            while (due_s := due_s + times.expovariate(load.per_s)) < begin_s + WARM_S + duration_s:
                await asyncio.sleep(due_s - time.monotonic())
                tasks.append(asyncio.create_task(self.send(contents, load.tenant, load.timeout_s, load.outcomes)))

        await asyncio.gather(*map(arrivals, loads))
        await asyncio.gather(*tasks)
        return begin_s

    async def goodput(self, per_s: float, duration_s: float, *, timeout_s: float | None) -> dict[str, float]:
        load = Load("all", Tenant("a"), per_s, timeout_s)
        begin_s = await self.run([load], duration_s)
        outcomes = load.after_warming(begin_s)
        ended = [outcome for outcome in outcomes if outcome.total_s is not None]
        return {
            "sent_per_s": len(outcomes) / duration_s,
            "good_per_s": sum(outcome.is_good for outcome in outcomes) / duration_s,
            "ended_per_s": len(ended) / duration_s,
            "refused_ratio": sum(outcome.is_refused for outcome in outcomes) / len(outcomes),
            "late_ratio": sum(not o.is_refused and not o.is_good for o in outcomes) / len(outcomes),
            "ttft_p50_s": _percentile([o.ttft_s for o in ended if o.ttft_s is not None], 50),
        }

    async def victim(
        self, per_s: float, flood_per_s: float, duration_s: float, *, names: tuple[str, str]
    ) -> dict[str, float]:
        flood = Load("flood", Tenant(names[0]), flood_per_s, None)
        victim = Load("victim", Tenant(names[1]), per_s, None)
        preempted = self.engine.stats().num_preemptions
        begin_s = await self.run([flood, victim], duration_s)
        outcomes = victim.after_warming(begin_s)
        ttfts_s = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
        return {
            "ttft_p50_s": _percentile(ttfts_s, 50),
            "ttft_p90_s": _percentile(ttfts_s, 90),
            "served_ratio": len(ttfts_s) / len(outcomes),
            "preemptions": self.engine.stats().num_preemptions - preempted,
        }

    def close(self) -> None:
        self._service.close()
        self.engine.shutdown()


def _percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


async def measure(seed: int, duration_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    bounded, unbounded = Bench(seed, MAX_WAIT_S), Bench(seed, None)
    try:
        capacity = await unbounded.capacity(duration_s / 2)
        say(f"capacity {capacity:.1f} requests/s")
        goodput = {}
        for load in LOADS:
            goodput[load] = await bounded.goodput(load * capacity, duration_s, timeout_s=TOTAL_TARGET_S)
            say(f"{load} x: {_shown(goodput[load])}")
        most = LOADS[-1] * capacity
        deadlines_only = await unbounded.goodput(most, duration_s, timeout_s=TOTAL_TARGET_S)
        say(f"{LOADS[-1]} x, deadlines only: {_shown(deadlines_only)}")
        without = await unbounded.goodput(most, duration_s, timeout_s=None)
        say(f"{LOADS[-1]} x, no deadlines: {_shown(without)}")
        results: dict[str, Any] = {}
        for kind, (used, other, names) in VICTIMS.items():
            of, beside = used * capacity, other * capacity
            alone = await unbounded.victim(of, beside, VICTIM_RUNS * duration_s, names=names)
            say(f"{kind}, in their shares: {_shown(alone)}")
            flooded = await unbounded.victim(of, FLOOD * beside, VICTIM_RUNS * duration_s, names=names)
            say(f"{kind}, one floods: {_shown(flooded)}")
            results[kind] = {"alone": alone, "flooded": flooded}
    finally:
        bounded.close()
        unbounded.close()
    peak = max(result["good_per_s"] for result in goodput.values())
    ratios = {kind: r["flooded"]["ttft_p90_s"] / r["alone"]["ttft_p90_s"] for kind, r in results.items()}
    return {
        "goodput_at_3x_over_peak": goodput[LOADS[-1]]["good_per_s"] / peak,
        "goodput_at_3x_over_peak_with_deadlines_only": deadlines_only["good_per_s"] / peak,
        "goodput_at_3x_over_peak_without_deadlines": without["good_per_s"] / peak,
        "victim_ttft_p90_ratio": ratios["two tenants"],
        "victim_ttft_p90_ratio_of_one_tenant": ratios["one tenant"],
        "victim_ttft_p90_ratio_at_four_fifths": ratios["two tenants, at four fifths"],
        "capacity_per_s": capacity,
        "goodput": goodput,
        "goodput_with_deadlines_only": deadlines_only,
        "goodput_without_deadlines": without,
        "victim": results,
    }


def _shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration-s", type=float, default=10.0, help="of each load, after warming up")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.seed, options.duration_s, lambda line: print(line, flush=True)))
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(figures, indent=2) + "\n")
    for name in [name for name, value in figures.items() if isinstance(value, float)]:
        print(f"{name}: {figures[name]:.3g}")
    print(f"written to {OUTPUT}")


if __name__ == "__main__":
    main()
