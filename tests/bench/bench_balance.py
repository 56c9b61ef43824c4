"""Affinity and balance at once, in a real cluster of 16 fake workers: build/bench/balance.json and .svg.

A slice of Mooncake's conversation trace, scaled down, is replayed at three speeds: at half of what the workers can
compute, at eight tenths, and at all of it. Ten times a second the directory says what each has to do. For each load:

    hit_ratio_over_ideal        prompt tokens found in caches, over what one cache of everything would find
    most_excess_requests        by how much the worker with most to do was ever above its fair share, in the work of the
                                longest request
    busiest_over_mean           prompt tokens computed by the worker that computed most, over the mean
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import uvloop
from service import serve

from pagoda.cluster.loadtest.ideal import ideal_cached_tokens
from pagoda.cluster.loadtest.openai_target import OpenAITarget
from pagoda.cluster.loadtest.runner import LoadOptions, LoadRunner
from pagoda.cluster.loadtest.trace import Trace, TraceWorkload, read_trace
from pagoda.worker.model_store import DEFAULT_MODEL

OUTPUT = Path("build/bench/balance.json")
TRACE = Path(__file__).parent.parent / "data" / "mooncake_conversation_600.jsonl"
NUM_WORKERS = 16
LOADS = (0.5, 0.8, 1.0)
BLOCK_TOKENS, MAX_INPUT_TOKENS, OUTPUT_SCALE = 32, 2048, 0.05
STEP_S, TOKEN_S = 0.01, 0.003
LOOK_S = 0.1


def workload(trace: Trace, speed: float) -> TraceWorkload:
    return TraceWorkload(
        trace,
        block_tokens=BLOCK_TOKENS,
        output_scale=OUTPUT_SCALE,
        max_input_tokens=MAX_INPUT_TOKENS,
        speed=speed,
    )


def full_speed(trace: Trace) -> float:
    """At which the workers compute all the time, if every prefix is found that has been there before."""
    known: set[int] = set()
    num_tokens = 0
    for row in trace.rows:
        length = min(MAX_INPUT_TOKENS, max(1, round(row.input_tokens * BLOCK_TOKENS / 512)))
        num_known = next((n for n, block in enumerate(row.hash_ids) if block not in known), len(row.hash_ids))
        known.update(row.hash_ids)
        num_tokens += length - min(length - 1, num_known * BLOCK_TOKENS) + round(row.output_tokens * OUTPUT_SCALE)
    return NUM_WORKERS * (trace.rows[-1].time_s - trace.rows[0].time_s) / (num_tokens * TOKEN_S)


async def watch(port: int, most_excess_s: list[float], work_s: list[float]) -> None:
    """Notes at each look the most that a worker has above its fair share, and how much there is on average."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        while True:
            workers = (await http.get("/directory/stats")).json()["workers"]
            costs_s = [(int(w["num_uncached_tokens"]) + int(w["reserved_tokens"])) * TOKEN_S for w in workers]
            assert len(costs_s) == NUM_WORKERS, f"the directory knows {len(costs_s)} workers any more"
            mean_s = sum(costs_s) / NUM_WORKERS
            most_excess_s.append(max(costs_s) - mean_s)
            work_s.append(mean_s)
            await asyncio.sleep(LOOK_S)


async def replay(port: int, trace: Trace, load: float, speed: float, duration_s: float) -> dict[str, Any]:
    target = OpenAITarget(
        f"http://127.0.0.1:{port}", model=DEFAULT_MODEL, fields={"temperature": 0.0, "ignore_eos": True}
    )
    excess_s: list[float] = []
    work_s: list[float] = []
    watching = asyncio.create_task(watch(port, excess_s, work_s))
    before = await computed(port)
    try:
        options = LoadOptions(as_recorded=True, duration_s=duration_s, seed=round(load * 100))
        result = await LoadRunner(workload(trace, load * speed), target, options).run()
    finally:
        if watching.done():
            watching.result()
        watching.cancel()
        await target.close()
    failed = [record for record in result.records if record.error is not None]
    assert not failed, failed[0]
    prompts = {key: list(request.prompt) for key, request in result.requests.items()}
    after = await computed(port)
    tokens = [after[worker] - before.get(worker, 0) for worker in after]
    longest_s = max(len(prompt) for prompt in prompts.values()) * TOKEN_S
    return {
        "load": load,
        "num_requests": len(result.records),
        "hit_ratio": sum(r.num_cached_tokens or 0 for r in result.records) / sum(map(len, prompts.values())),
        "hit_ratio_over_ideal": sum(r.num_cached_tokens or 0 for r in result.records)
        / sum(ideal_cached_tokens(result.records, prompts).values()),
        "most_excess_requests": max(excess_s) / longest_s,
        "mean_work_s": sum(work_s) / len(work_s),
        "busiest_over_mean": max(tokens) / (sum(tokens) / NUM_WORKERS),
        "excess_s": excess_s,
        "work_s": work_s,
    }


async def computed(port: int) -> dict[str, int]:
    """Prompt tokens that each worker was given and did not hold."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        workers = (await http.get("/directory/stats")).json()["workers"]
    return {w["worker_id"]: int(w["placed_tokens"]) - int(w["placed_cached_tokens"]) for w in workers}


def plot(loads: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(loads), figsize=(11, 3.2), sharey=True)
    for axis, each in zip(axes, loads, strict=True):
        times = [index * LOOK_S for index in range(len(each["work_s"]))]
        axis.plot(times, each["work_s"], color="#2a6f97", label="fair share")
        busiest = [work + excess for work, excess in zip(each["work_s"], each["excess_s"], strict=True)]
        axis.plot(times, busiest, color="#c08552", label="busiest worker")
        axis.set_title(f"load {each['load']}: {each['hit_ratio_over_ideal']:.0%} of the ideal hits")
        axis.set_xlabel("s")
    axes[0].set_ylabel("s of prompts to compute")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


async def replay_all(port: int, trace: Trace, duration_s: float) -> list[dict[str, Any]]:
    while len(await computed(port)) < NUM_WORKERS:  # one suffices for the service to answer
        await asyncio.sleep(0.5)
    loads = []
    for load in LOADS:
        loads.append(await replay(port, trace, load, full_speed(trace), duration_s))
        shown = {name: value for name, value in loads[-1].items() if not isinstance(value, list)}
        print({name: round(value, 3) for name, value in shown.items()}, flush=True)
        await asyncio.sleep(2.0)
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration-s", type=float, default=45.0)
    duration_s = parser.parse_args().duration_s
    trace = read_trace(TRACE)
    options = ("--workers", str(NUM_WORKERS), "--fake-step-s", str(STEP_S), "--fake-token-s", str(TOKEN_S))
    with serve(DEFAULT_MODEL, *options) as service:
        loads = uvloop.run(replay_all(service.port, trace, duration_s))
    plot(loads, OUTPUT.with_suffix(".svg"))
    result = {
        "hit_ratio_over_ideal": min(each["hit_ratio_over_ideal"] for each in loads),
        "most_excess_requests": max(each["most_excess_requests"] for each in loads),
        "loads": [{name: value for name, value in each.items() if not isinstance(value, list)} for each in loads],
    }
    OUTPUT.write_text(json.dumps(result, indent=2) + "\n")
    print(OUTPUT.read_text(), end="")


if __name__ == "__main__":
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    main()
