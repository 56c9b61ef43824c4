"""Where a decode step's time goes: a table of every operator, and a flame graph in build/bench/profile.svg.

The table is made with the halves of a layer taken apart into their operators, so that each can be timed; the row
"one call a half" says what the same work takes as it is served. The flame graph is of the engine as it is served.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from pagoda.kernels import blocks
from pagoda.kernels.interface import AttentionBatch
from pagoda.worker.build import load_model
from pagoda.worker.config import CacheConfig, EngineConfig
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.model_store import ModelStore

OUTPUT = Path("build/bench/profile.svg")
MODEL = "smollm2-135m"
NUM_STEPS = 50
OPERATORS = ("add_rms_norm", "linear", "linear_float32", "gated_linear", "rope_kv_write", "attend", "plan")


class Timed:
    """Operators whose calls are timed, with the halves of a layer taken apart."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if name not in OPERATORS:
            return function

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            label = f"{name} {arguments[1].num_in} -> {arguments[1].num_out}" if name.startswith("linear") else name
            self.seconds[label] += time.perf_counter() - begin
            return result

        return timed

    def attention_block(self, *arguments: Any) -> torch.Tensor:
        return blocks.attention_block(self, *arguments)  # type: ignore[arg-type]

    def feed_forward_block(self, *arguments: Any) -> torch.Tensor:
        return blocks.feed_forward_block(self, *arguments)  # type: ignore[arg-type]


def batch_of(num_requests: int, context_len: int, block_size: int) -> AttentionBatch:
    """A step that decodes: every request has its blocks, one after the other."""
    num_blocks = -(-context_len // block_size)
    table_BM = torch.arange(num_requests * num_blocks, dtype=torch.int32).view(num_requests, num_blocks)
    last_slot = (context_len - 1) % block_size
    return AttentionBatch(
        block_table_BM=table_BM,
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens_B=torch.full((num_requests,), context_len, dtype=torch.int32),
        slot_mapping_T=table_BM[:, -1].long() * block_size + last_slot,
        num_decodes=num_requests,
        query_lens=(1,) * num_requests,
        seq_lens=(context_len,) * num_requests,
    )


def table(num_requests: int, context_len: int, model_path: Path, num_threads: int) -> None:
    cache = CacheConfig(num_blocks=num_requests * (1 + context_len // 16))
    model, cache_NL2PKD = load_model(plan_engine(EngineConfig(model_path, cache=cache)), num_threads, lambda *_: None)
    batch = batch_of(num_requests, context_len, cache_NL2PKD.shape[3])
    token_ids_B = torch.randint(0, model.config.vocab_size, (num_requests,))
    positions_B = torch.full((num_requests,), context_len - 1)

    def step_s(ops: Any) -> float:
        model.ops = ops
        begin = time.perf_counter()
        for _ in range(NUM_STEPS):
            plan = ops.plan(batch, cache_NL2PKD.shape[3], cache_NL2PKD.dtype)
            hidden_BE = model(token_ids_B, positions_B, cache_NL2PKD, [plan])
            model.logits(hidden_BE)
        return (time.perf_counter() - begin) / NUM_STEPS

    served = model.ops
    timed = Timed(served)
    with torch.inference_mode():
        step_s(served)
        served_s = step_s(served)
        apart_s = step_s(timed)
    rows = sorted(((seconds / NUM_STEPS, name) for name, seconds in timed.seconds.items()), reverse=True)
    rows.append((apart_s - sum(seconds for seconds, _ in rows), "everything else"))
    print(f"{num_requests} requests of {context_len} tokens, {served.name}, {num_threads} threads")
    for seconds, name in rows:
        print(f"  {name:<24}{seconds * 1e3:8.2f} ms {seconds / apart_s:6.1%}")
    print(f"  {'sum':<24}{apart_s * 1e3:8.2f} ms")
    print(f"  {'one call a half':<24}{served_s * 1e3:8.2f} ms")


def flame(num_requests: int, context_len: int, model_path: Path, num_threads: int) -> None:
    py_spy = Path(sys.executable).with_name("py-spy")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    record = [str(py_spy), "record", "--native", "--rate", "200", "--output", str(OUTPUT), "--"]
    script = Path(__file__).with_name("cpu_engine.py")
    what = map(str, (script, model_path, num_threads, num_requests, context_len))
    subprocess.run([*record, sys.executable, *what], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=200, help="tokens of each request")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    model_path = ModelStore(Path.home() / ".cache/pagoda/models").path_of(MODEL)
    table(arguments.requests, arguments.context, model_path, arguments.threads)
    flame(arguments.requests, arguments.context, model_path, arguments.threads)


if __name__ == "__main__":
    main()
