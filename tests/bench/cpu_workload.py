"""The offline workload that engines are compared on. Standard library only: it runs in a peer's environment too.

Greedy decode of 128 tokens for 1, 8 and 32 requests with 16-token prompts, decode of 64 tokens for 32 requests with
1,000-token prompts, and the time to the first token of one 512- and one 2,048-token prompt. Prompts are seeded random
token ids, so that every engine gets the same ones and no prefix cache helps.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

Generate = Callable[[Sequence[Sequence[int]], int], None]
"""Decodes that many tokens for each of these prompts, greedily, ignoring the end of the sequence."""

MAX_MODEL_LEN = 4096
NUM_REPEATS = 3


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, 49_000) for _ in range(length)] for _ in range(count)]


def measure(generate: Generate) -> dict[str, float]:
    """Medians: tokens per second of the decodes, seconds of the prefills."""
    seeds = iter(range(1, 1000))

    def seconds(count: int, length: int, num_output_tokens: int) -> float:
        batch = prompts(count, length, next(seeds))
        begin = time.perf_counter()
        generate(batch, num_output_tokens)
        return time.perf_counter() - begin

    def median(count: int, length: int, num_output_tokens: int) -> float:
        say(f"{count} x {length} + {num_output_tokens}")
        return statistics.median(seconds(count, length, num_output_tokens) for _ in range(NUM_REPEATS))

    seconds(2, 64, 8)
    result = {f"decode_b{count}_tok_s": count * 128 / median(count, 16, 128) for count in (1, 8, 32)}
    result["decode_b32_ctx1000_tok_s"] = 32 * 64 / median(32, 1000, 64)
    return result | {f"prefill_{length}_s": median(1, length, 1) for length in (512, 2048)}


def say(what: str) -> None:
    print(f"    {what}", file=sys.stderr, flush=True)


def report(result: dict[str, float]) -> None:
    """To whoever started this process."""
    print("RESULT " + json.dumps(result), flush=True)
