"""What a second rank costs beside its computing: one flat JSON object, metric -> number, in build/bench/tp.json.

step_ms_tp1, step_ms_tp2   a steady decode step of 32 requests: schedule, execute, update; its model costs nothing
overhead_ms                what the second rank adds to it, at most 1
plan_bytes_per_request     the largest plan of such a step, at most 200

Medians; runs of steps with one rank and with two alternate.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.build import build_rank
from pagoda.worker.config import EngineConfig, EngineLimits, SchedulerConfig
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.executor import Executor
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.local_ranks import LOCAL_RANKS
from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore
from pagoda.worker.parallel import SINGLE, TPContext
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.step_codec import StepEncoder
from pagoda.worker.tensor_parallel import start_tensor_parallel
from pagoda.worker.types import Request, RequestId, SamplingParams, SchedulerOutput

OUTPUT = Path("build/bench/tp.json")
NUM_REQUESTS = 32
BLOCK_SIZE = 16
CONTEXT, MAX_LEN = 200, 4096
MAX_STEP_TOKENS = 8192
NUM_RUNS, NUM_STEPS = 30, 50
MOST_OVERHEAD_MS, MOST_PLAN_BYTES = 1.0, 200.0


class SteadyDecode:
    """A scheduler over an executor, with requests that decode for ever."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self.executor = executor
        blocks_each = MAX_LEN // BLOCK_SIZE
        manager = KVManager(
            BlockPool(NUM_REQUESTS * blocks_each),
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            max_step_tokens=MAX_STEP_TOKENS,
        )
        limits = EngineLimits(MAX_LEN, vocab_size, max_num_seqs=NUM_REQUESTS, max_num_waiting=NUM_REQUESTS)
        config = SchedulerConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=MAX_STEP_TOKENS)
        self._scheduler = Scheduler(config, limits, manager, eos_token_ids=frozenset({2}))
        self._last_plan = SchedulerOutput(step=0)
        self._encoder = StepEncoder()
        """As the executor has one, for the size of what that sends."""
        self.most_plan_bytes = 0
        chain = HashDomain(b"weights", "", "bfloat16", "rope", BLOCK_SIZE).chain(b"")
        for index in range(NUM_REQUESTS):
            sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            request = Request(RequestId(f"cmpl-{index:032x}"), (300 + index,) * CONTEXT, sampling)
            self._scheduler.add(request, seed=0, hash_chain=chain)
        while self._scheduler.num_waiting or self._last_plan.new:
            self._encoder.encode(self.step())

    def step(self) -> SchedulerOutput:
        plan = self._last_plan = self._scheduler.schedule()
        self._scheduler.update(plan, self.executor.execute(plan))
        return plan

    def run(self) -> list[float]:
        """Milliseconds of each step."""
        times, plans = [], []
        for _ in range(NUM_STEPS):
            begin = time.perf_counter()
            plans.append(self.step())
            times.append((time.perf_counter() - begin) * 1e3)
        assert all(len(plan.num_scheduled_tokens) == NUM_REQUESTS for plan in plans)
        self.most_plan_bytes = max(self.most_plan_bytes, *(len(self._encoder.encode(plan)) for plan in plans))
        return times


def main() -> None:
    folder = ModelStore(DEFAULT_STORE).fetch(DEFAULT_MODEL, progress=lambda *_: None)
    config = EngineConfig(folder, device="cpu", num_threads=1, fake_step_s=0.0, tensor_parallel_size=2)
    plan = plan_engine(config)
    vocab_size = plan.model.vocab_size

    def build(context: TPContext) -> Executor:
        return build_rank(plan, config, context, lambda *_: None)

    two_ranks = start_tensor_parallel(config, LOCAL_RANKS, torch.device("cpu"), build)
    two_ranks.watch(lambda error: print(error, file=sys.stderr))
    try:
        one = SteadyDecode(build(SINGLE), vocab_size)
        two = SteadyDecode(two_ranks, vocab_size)
        times: dict[str, list[float]] = {"one": [], "two": []}
        for _ in tqdm(range(NUM_RUNS), desc="runs of steps", file=sys.stderr):
            times["one"] += one.run()
            times["two"] += two.run()
    finally:
        two_ranks.shutdown()
    step_ms_tp1, step_ms_tp2 = (statistics.median(times[name]) for name in ("one", "two"))
    result = {
        "step_ms_tp1": step_ms_tp1,
        "step_ms_tp2": step_ms_tp2,
        "overhead_ms": step_ms_tp2 - step_ms_tp1,
        "plan_bytes_per_request": two.most_plan_bytes / NUM_REQUESTS,
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({name: round(value, 4) for name, value in result.items()}, indent=2) + "\n")
    print(OUTPUT.read_text(), end="")
    if result["overhead_ms"] > MOST_OVERHEAD_MS or result["plan_bytes_per_request"] > MOST_PLAN_BYTES:
        raise SystemExit("more than it may be")


if __name__ == "__main__":
    main()
