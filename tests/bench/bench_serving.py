"""What serving costs beside the model: one flat JSON object, metric -> number, in build/bench/serving.json.

cpu_us_per_token_outside_engine   32 HTTP streams at 50 tok/s with a model that costs nothing: CPU of every process
                                  but the client, above that of the idle service, per token
added_ttft_ms_p50, added_itl_ms_p99    over HTTP against the same engine in this process, same load
http_over_offline_ratio           tokens/s of the real model, 32 clients over HTTP against 32 requests offline: the
                                  median, the least and the most of several pairs
"""

import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

import uvloop
from service import Service, Stream, serve

from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import EngineConfig, SchedulerConfig
from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore
from pagoda.worker.types import Request, RequestId, SamplingParams, SequenceOutput

OUTPUT = Path("build/bench/serving.json")
NUM_STREAMS = 32
STEP_S = 0.02
LOAD_S = 15
IDLE_S = 10
NUM_PROMPT_TOKENS = 16
NUM_REAL_TOKENS = 256
"""About what a chat answer has. Most of what HTTP costs beyond a token's share is the arrival of all 32 at once."""
NUM_REPEATS = 3
NUM_PAIRS = 7
SETTLE_S = 2.0
"""After a pause, for what has timed out meanwhile."""


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300, 40_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]


async def over_http(service: Service, num_tokens: int, seed: int) -> list[Stream]:
    return await asyncio.gather(*(service.stream(prompt, num_tokens) for prompt in prompts(seed)))


async def offline(engine: AsyncEngine, num_tokens: int, seed: int) -> list[Stream]:
    async def run(index: int, prompt: list[int]) -> Stream:
        stream = Stream(time.perf_counter())

        def sink(_: SequenceOutput) -> None:
            stream.piece_s.append(time.perf_counter())

        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        await engine.run(Request(RequestId(f"{seed}-{index}"), tuple(prompt), sampling), sink)
        return stream

    return await asyncio.gather(*(run(index, prompt) for index, prompt in enumerate(prompts(seed))))


def tokens_per_s(streams: list[Stream], num_tokens: int) -> float:
    begin, end = min(s.sent_s for s in streams), max(s.piece_s[-1] for s in streams)
    return len(streams) * num_tokens / (end - begin)


def p50_ttft_ms(streams: list[Stream]) -> float:
    return statistics.median(stream.ttft_s for stream in streams) * 1e3


def p99_gap_ms(streams: list[Stream]) -> float:
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return statistics.quantiles(gaps, n=100)[98] * 1e3


async def overhead() -> dict[str, float]:
    """The service with a model that costs nothing."""
    num_tokens = round(LOAD_S / STEP_S)
    config = EngineConfig(ModelStore(DEFAULT_STORE).path_of(DEFAULT_MODEL), fake_step_s=STEP_S)
    engine = AsyncEngine(config, progress=lambda *_: None)
    bare = [await offline(engine, num_tokens // 3, seed) for seed in range(NUM_REPEATS)]
    engine.shutdown()
    with serve(DEFAULT_MODEL, "--fake-step-s", str(STEP_S)) as service:
        await over_http(service, 50, seed=99)
        say(f"idle for {IDLE_S} s")
        before, begin = service.cpu_s(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        idle_rate = (service.cpu_s() - before) / (time.perf_counter() - begin)
        costs, loaded = [], []
        for repeat in range(NUM_REPEATS):
            say(f"{NUM_STREAMS} streams for {LOAD_S} s, {repeat + 1} of {NUM_REPEATS}")
            before, begin = service.cpu_s(), time.perf_counter()
            loaded.append(await over_http(service, num_tokens, seed=repeat))
            seconds = time.perf_counter() - begin
            cpu_s = service.cpu_s() - before - idle_rate * seconds
            costs.append(cpu_s / (NUM_STREAMS * num_tokens) * 1e6)
    return {
        "cpu_us_per_token_outside_engine": statistics.median(costs),
        "added_ttft_ms_p50": statistics.median(map(p50_ttft_ms, loaded)) - statistics.median(map(p50_ttft_ms, bare)),
        "added_itl_ms_p99": statistics.median(map(p99_gap_ms, loaded)) - statistics.median(map(p99_gap_ms, bare)),
    }


async def http_over_offline() -> dict[str, float]:
    """The service with the real model and the engine alone, in turn: the machine's speed changes by itself.

    While the engine runs alone, the service's processes stand still. The first of each is not counted.
    """
    num_tokens = NUM_REAL_TOKENS
    path = ModelStore(DEFAULT_STORE).path_of(DEFAULT_MODEL)
    config = EngineConfig(path, scheduler=SchedulerConfig(max_num_seqs=NUM_STREAMS))
    with serve(DEFAULT_MODEL, "--max-num-seqs", str(NUM_STREAMS)) as service:
        engine = AsyncEngine(config, progress=lambda *_: None)
        alone, http = [], []
        for seed in range(NUM_PAIRS + 1):
            with service.paused():
                alone.append(tokens_per_s(await offline(engine, num_tokens, seed), num_tokens))
            await asyncio.sleep(SETTLE_S)
            http.append(tokens_per_s(await over_http(service, num_tokens, seed), num_tokens))
            say(f"the real model: {alone[-1]:.0f} tokens/s offline, {http[-1]:.0f} over HTTP")
        engine.shutdown()
    ratios = [ours / theirs for ours, theirs in zip(http[1:], alone[1:], strict=True)]
    return {
        "offline_tokens_per_s": statistics.median(alone[1:]),
        "http_tokens_per_s": statistics.median(http[1:]),
        "http_over_offline_ratio": statistics.median(ratios),
        "http_over_offline_ratio_least": min(ratios),
        "http_over_offline_ratio_most": max(ratios),
    }


def main() -> None:
    result = uvloop.run(overhead()) | uvloop.run(http_over_offline())
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=2) + "\n")
    print(OUTPUT.read_text(), end="")


if __name__ == "__main__":
    main()
