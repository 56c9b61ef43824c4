"""What the engine costs beside the model: one flat JSON object, metric -> number, in build/bench/engine.json.

schedule_update_ms_b32, _b256   one steady decode step of scheduler and KV manager, 1,000-token contexts
input_build_ms_b32              gathering that step's arrays
metrics_us_per_token_b1, _b32    measuring a token of a steady decode step, in the engine's thread
serve_to_first_token_s          from `pagoda serve` to the first token over HTTP, model cache warm
"""

import argparse
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.config import EngineLimits, SchedulerConfig
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.metrics import WorkerMetrics
from pagoda.worker.model_store import DEFAULT_MODEL
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.types import (
    ModelRunnerOutput,
    Request,
    RequestId,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
)

OUTPUT = Path("build/bench/engine.json")
BLOCK_SIZE = 16
CONTEXT = 1000
NUM_STEPS = 400
START_LIMIT_S = 180.0


class SteadyDecode:
    """A scheduler and a rank's batch with `num_seqs` sequences that decode for ever, and no model."""

    def __init__(self, num_seqs: int) -> None:
        limits = EngineLimits(max_model_len=4 * CONTEXT, vocab_size=50_000, max_num_seqs=num_seqs, max_num_waiting=4096)
        blocks_each = -(-limits.max_model_len // BLOCK_SIZE)
        manager = KVManager(
            BlockPool(num_seqs * blocks_each), block_size=BLOCK_SIZE, enable_prefix_caching=True, max_step_tokens=1024
        )
        config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192)
        self.scheduler = Scheduler(config, limits, manager, eos_token_ids=frozenset({2}))
        self.batch = InputBatch(max_num_seqs=num_seqs, max_model_len=limits.max_model_len, block_size=BLOCK_SIZE)
        self._draw = random.Random(0)
        chain = HashDomain(b"weights", "", "bfloat16", "rope", BLOCK_SIZE).chain(b"")
        for index in range(num_seqs):
            prompt = tuple(self._draw.randrange(3, 50_000) for _ in range(CONTEXT))
            sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            self.scheduler.add(Request(RequestId(str(index)), prompt, sampling), seed=0, hash_chain=chain)
        self._last = SchedulerOutput(step=0)
        while self.scheduler.num_waiting or any(count != 1 for count in self._last.num_scheduled_tokens.values()):
            self.step()

    def step(self) -> tuple[float, float]:
        """One step. Returns seconds in (schedule + update, input building)."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        self.batch.apply(plan)
        inputs = self.batch.build(plan)
        built = time.perf_counter()
        result = ModelRunnerOutput({sequence_id: self._draw.randrange(3, 50_000) for sequence_id, _ in inputs.sampled})
        begin_finish = time.perf_counter()
        self.batch.finish(plan, result.sampled)
        begin_update = time.perf_counter()
        self.scheduler.update(plan, result)
        end = time.perf_counter()
        self._last = plan
        return (scheduled - begin) + (end - begin_update), (built - scheduled) + (begin_update - begin_finish)


def control_path_ms(num_seqs: int) -> tuple[float, float]:
    """Median milliseconds of (schedule + update, input building)."""
    decode = SteadyDecode(num_seqs)
    times = [decode.step() for _ in tqdm(range(NUM_STEPS), desc=f"{num_seqs} sequences", file=sys.stderr)]
    schedule, build = zip(*times, strict=True)
    return statistics.median(schedule) * 1e3, statistics.median(build) * 1e3


def metrics_us_per_token(num_seqs: int) -> float:
    """Median microseconds that a decode step of `num_seqs` sequences spends on its metrics, for each token."""
    metrics = WorkerMetrics(worker="bench")
    ids = [RequestId(str(index)) for index in range(num_seqs)]
    for request_id in ids:
        with metrics.arrival(Request(request_id, (1,), SamplingParams())):
            pass
    executor = metrics.measured(_NoExecutor())
    plan = SchedulerOutput(1, num_scheduled_tokens={SequenceId(f"{request_id}/0"): 1 for request_id in ids})
    outputs = [SequenceOutput(request_id, 0, (1,)) for request_id in ids]
    times = []
    for _ in range(10 * NUM_STEPS):
        begin = time.perf_counter()
        executor.execute(plan)
        metrics.take_outputs(outputs)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / num_seqs * 1e6


class _NoExecutor:
    """Computes nothing."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:  # noqa: ARG002
        return ModelRunnerOutput({})

    def shutdown(self) -> None:
        pass


def serve_to_first_token_s() -> float:
    """Start the service as a user would and ask for one token as soon as it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pagoda = Path(sys.executable).with_name("pagoda")
    begin = time.perf_counter()
    server = subprocess.Popen([pagoda, "serve", "--model", DEFAULT_MODEL, "--port", str(port)])
    try:
        return _wait_for(lambda: _ask(port), server) - begin
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def _ask(port: int) -> None:
    body = {"model": DEFAULT_MODEL, "prompt": "Once", "max_tokens": 1, "stream": True}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: {")


def _wait_for(ask: Callable[[], None], server: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            ask()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
        else:
            return time.perf_counter()
    raise SystemExit("the service did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-serve", action="store_true", help="leave out serve_to_first_token_s")
    arguments = parser.parse_args()
    schedule_32, build_32 = control_path_ms(32)
    schedule_256, _ = control_path_ms(256)
    result = {
        "schedule_update_ms_b32": schedule_32,
        "schedule_update_ms_b256": schedule_256,
        "input_build_ms_b32": build_32,
        "metrics_us_per_token_b1": metrics_us_per_token(1),
        "metrics_us_per_token_b32": metrics_us_per_token(32),
    }
    if not arguments.skip_serve:
        result["serve_to_first_token_s"] = serve_to_first_token_s()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({name: round(value, 4) for name, value in result.items()}, indent=2) + "\n")
    print(OUTPUT.read_text(), end="")


if __name__ == "__main__":
    main()
