"""Where requests go, and what that is worth: build/bench/placement.json and .svg.

Three workers with the real model and small KV pools, and conversations that together need more than one pool holds and
about as much work as one worker can do. All begin with one system prompt, as those of an application do. The same
requests, in turn, placed by the directory, by Serve's choice of the less loaded of two, and by Ray's own prefix router.
Medians over the repeats:

    hit_ratio_over_ideal      prompt tokens found in caches, over what one LRU cache as large as all pools would find
    ttft_mean_vs_pow2, ttft_p90_vs_pow2, ttft_mean_vs_ray_prefix      how many times as long the others take
"""

import argparse
import asyncio
import json
import os
import statistics
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import uvloop
from service import serve

from pagoda.cluster.loadtest.ideal import BLOCK_TOKENS, ideal_cached_tokens, tokenize_all
from pagoda.cluster.loadtest.openai_target import OpenAITarget
from pagoda.cluster.loadtest.runner import LoadOptions, LoadRunner
from pagoda.cluster.loadtest.workloads import ChatWorkload
from pagoda.worker.model_store import DEFAULT_MODEL

OUTPUT = Path("build/bench/placement.json")
NUM_WORKERS = 3
KV_CACHE_GIB = 0.17
WORKLOAD = ChatWorkload(
    num_turns=6, num_system_prompts=1, system_tokens=300, user_tokens=120, output_tokens=24, pause_s=6.0
)
RATE, DURATION_S = 0.3, 75.0
ARMS = {
    "directory": (),
    "pow2": ("--directories", "0"),
    "ray_prefix": ("--directories", "0", "--router", "ray_prefix_router:RayPrefixRouter"),
}


async def load(port: int, seed: int, num_pool_blocks: int | None) -> dict[str, Any]:
    target = OpenAITarget(
        f"http://127.0.0.1:{port}", model=DEFAULT_MODEL, fields={"temperature": 0.0, "ignore_eos": True}
    )
    try:
        options = LoadOptions(rate=RATE, duration_s=DURATION_S, seed=seed)
        result = await LoadRunner(WORKLOAD, target, options).run()
        prompts = await tokenize_all(target, result.requests) if num_pool_blocks else None
    finally:
        await target.close()
    failed = [record for record in result.records if record.error is not None]
    assert not failed, failed[0]
    ttft_s = [record.ttft_s for record in result.records]
    figures: dict[str, Any] = {
        "num_requests": len(result.records),
        "ttft_mean_ms": float(np.mean(ttft_s)) * 1e3,
        "ttft_p90_ms": float(np.percentile(ttft_s, 90)) * 1e3,
        "hit_ratio": sum(r.num_cached_tokens or 0 for r in result.records)
        / sum(r.num_prompt_tokens or 0 for r in result.records),
    }
    if prompts is not None and num_pool_blocks is not None:
        best = ideal_cached_tokens(result.records, prompts, max_blocks=NUM_WORKERS * num_pool_blocks)
        figures["hit_ratio_over_ideal"] = sum(r.num_cached_tokens or 0 for r in result.records) / sum(best.values())
        distinct = {
            tuple(tokens[: end + BLOCK_TOKENS])
            for tokens in prompts.values()
            for end in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        }
        figures["distinct_blocks_over_pool"] = len(distinct) / num_pool_blocks
    return figures


def run(arm: str, seed: int) -> dict[str, Any]:
    options = ("--workers", str(NUM_WORKERS), "--threads", "1", "--kv-cache-gib", str(KV_CACHE_GIB), *ARMS[arm])
    with serve(DEFAULT_MODEL, *options) as service:
        num_pool_blocks = None
        if arm == "directory":
            with urllib.request.urlopen(f"http://127.0.0.1:{service.port}/directory/stats") as answer:
                num_pool_blocks = json.load(answer)["workers"][0]["num_blocks"]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(load(service.port, seed, num_pool_blocks))
    print(arm, seed, {name: round(value, 3) for name, value in figures.items()}, flush=True)
    return figures


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    for axis, name in zip(axes, ("ttft_mean_ms", "ttft_p90_ms", "hit_ratio"), strict=True):
        medians = [statistics.median(each[name] for each in runs[arm]) for arm in ARMS]
        axis.bar(list(ARMS), medians, color=["#2a6f97", "#c9ada7", "#9a8c98"])
        for index, arm in enumerate(ARMS):
            axis.plot([index] * len(runs[arm]), [each[name] for each in runs[arm]], "k.", markersize=4)
        axis.set_title(name)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm in ARMS:
            runs[arm].append(run(arm, seed=repeat))

    def ratio(name: str, other: str) -> float:
        pairs = zip(runs[other], runs["directory"], strict=True)
        return statistics.median(theirs[name] / ours[name] for theirs, ours in pairs)

    result = {
        "hit_ratio_over_ideal": statistics.median(each["hit_ratio_over_ideal"] for each in runs["directory"]),
        "ttft_mean_vs_pow2": ratio("ttft_mean_ms", "pow2"),
        "ttft_p90_vs_pow2": ratio("ttft_p90_ms", "pow2"),
        "ttft_mean_vs_ray_prefix": ratio("ttft_mean_ms", "ray_prefix"),
        "repeats": repeats,
        "runs": runs,
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=2) + "\n")
    plot(runs, OUTPUT.with_suffix(".svg"))
    print({name: value for name, value in result.items() if name != "runs"})


if __name__ == "__main__":
    main()
