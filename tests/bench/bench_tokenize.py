"""What the token cache saves in a long chat: one flat JSON object, metric -> number, in build/bench/tokenize.json.

tokenize_cached_over_plain      time to tokenise all prompts of a 50-turn chat, with the cache over without
tokenize_last_turn_cached_over_plain    the same for the last turn's prompt alone
tokenize_plain_ms_last_turn, tokenize_cached_ms_last_turn    that turn in milliseconds, template included
decode_pair_us                  turning two tokens into text, as detokenising does twice a token
"""

import json
import statistics
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore
from pagoda.worker.tokenizer import Tokenizer

OUTPUT = Path("build/bench/tokenize.json")
NUM_TURNS = 50
NUM_RUNS = 3
QUESTION = "And what would happen if we did that twice, say at {turn}:30 in 日本, before the others are back?"
ANSWER = (
    "That depends on who's there. In the first place, it takes about 1250 steps; then\n\n```python\nx = f(x)\n```\n" * 6
)


def prompts() -> list[list[dict[str, str]]]:
    """The messages of each turn's prompt."""
    messages, found = [{"role": "system", "content": "You are a helpful assistant."}], []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": QUESTION.format(turn=turn)})
        found.append(list(messages))
        messages.append({"role": "assistant", "content": f"{turn}. {ANSWER}"})
    return found


def turn_times_ms(tokenizer: Tokenizer, turns: list[list[dict[str, str]]]) -> tuple[list[float], list[list[int]]]:
    times, results = [], []
    for messages in turns:
        begin = time.perf_counter()
        results.append(tokenizer.encode_chat(messages))
        times.append((time.perf_counter() - begin) * 1e3)
    return times, results


def decode_pair_us(tokenizer: Tokenizer, ids: list[int]) -> float:
    begin = time.perf_counter()
    for at in range(len(ids) - 1):
        tokenizer.decode(ids[at : at + 2])
    return (time.perf_counter() - begin) / (len(ids) - 1) * 1e6


def main() -> None:
    folder = ModelStore(DEFAULT_STORE).fetch(DEFAULT_MODEL, progress=lambda *_: None)
    turns = prompts()
    plain, cached = [], []
    for _ in tqdm(range(NUM_RUNS), desc=f"{NUM_TURNS} turns", file=sys.stderr):
        tokenizer = Tokenizer(folder)
        cached.append(turn_times_ms(tokenizer, turns))
        tokenizer._cache = None
        plain.append(turn_times_ms(tokenizer, turns))
        if plain[-1][1] != cached[-1][1]:
            raise SystemExit("the cache gives other tokens")
    ids = plain[0][1][-1]
    totals = [sum(c) / sum(p) for (c, _), (p, _) in zip(cached, plain, strict=True)]
    last_plain = statistics.median(times[-1] for times, _ in plain)
    last_cached = statistics.median(times[-1] for times, _ in cached)
    result = {
        "tokenize_cached_over_plain": statistics.median(totals),
        "tokenize_last_turn_cached_over_plain": last_cached / last_plain,
        "tokenize_plain_ms_last_turn": last_plain,
        "tokenize_cached_ms_last_turn": last_cached,
        "tokenize_last_turn_tokens": len(ids),
        "decode_pair_us": decode_pair_us(tokenizer, ids),
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({name: round(value, 4) for name, value in result.items()}, indent=2) + "\n")
    print(OUTPUT.read_text(), end="")


if __name__ == "__main__":
    main()
