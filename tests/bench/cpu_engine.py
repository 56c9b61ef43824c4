"""The workload on our engine, in a process of its own: `python cpu_engine.py MODEL NUM_THREADS`.

With REQUESTS and CONTEXT behind them it only lets so many requests go on from such prompts, for a profile.
"""

import time

BEGIN = time.perf_counter()  # imports count as loading

import asyncio  # noqa: E402
import itertools  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from cpu_workload import MAX_MODEL_LEN, measure, prompts, report  # noqa: E402

from pagoda.worker.async_engine import AsyncEngine  # noqa: E402
from pagoda.worker.config import CacheConfig, EngineConfig  # noqa: E402
from pagoda.worker.types import Request, RequestId, SamplingParams  # noqa: E402

NUM_PROFILED_TOKENS = 256


class OfflineEngine:
    """An engine with an event loop to call it from."""

    def __init__(self, model: Path, num_threads: int) -> None:
        config = EngineConfig(
            model,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            num_threads=num_threads,
            cache=CacheConfig(enable_prefix_caching=False),
        )
        self._engine = AsyncEngine(config, progress=lambda *_: None)
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count()

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> None:
        self._loop.run_until_complete(self._generate(prompts, num_output_tokens))

    async def _generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
        requests = [Request(RequestId(str(next(self._ids))), tuple(prompt), sampling) for prompt in prompts]
        await asyncio.gather(*(self._engine.run(request, lambda _: None) for request in requests))

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.close()


def main() -> None:
    engine = OfflineEngine(Path(sys.argv[1]), int(sys.argv[2]))
    engine.generate([[1, 2, 3]], 1)
    if len(sys.argv) > 3:
        engine.generate(prompts(int(sys.argv[3]), int(sys.argv[4]), seed=0), NUM_PROFILED_TOKENS)
        engine.close()
        return
    report({"load_to_first_token_s": time.perf_counter() - BEGIN} | measure(engine.generate))
    engine.close()


if __name__ == "__main__":
    main()
