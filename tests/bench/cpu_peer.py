"""The workload on vLLM's CPU build; run by its own Python: `DIR/bin/python cpu_peer.py MODEL NUM_THREADS`."""

import os
import sys
import time
from collections.abc import Sequence

from cpu_workload import MAX_MODEL_LEN, measure, report


def main() -> None:
    begin = time.perf_counter()
    model, num_threads = sys.argv[1:]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="4", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS=num_threads
    )
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False)

    def generate(prompts: Sequence[Sequence[int]], num_output_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    generate([[1, 2, 3]], 1)
    report({"load_to_first_token_s": time.perf_counter() - begin} | measure(generate))


if __name__ == "__main__":
    main()
