"""A real model on three ranks, actors of a placement group: it says what one rank says, also after a death."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from local_server import wait_until
from ray_service import COMPLETIONS, PAGODA, START_DEADLINE_S, pagoda_serve

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, there was a lighthouse keeper who",
    "1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics are",
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 24},
]
COMMON = ("--dtype", "float32", "--max-model-len", "512")
RANK = "ray::RankActor"


def on_one_rank(model: Path, folder: Path) -> list[str]:
    """What `pagoda generate` says, without Ray."""
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt} | how) + "\n" for how in SAMPLING for prompt in PROMPTS))
    command = [PAGODA, "generate", "--model", model, *COMMON, "--kv-cache-gib", "0.3", "--input", lines]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_DEADLINE_S).stdout
    return [json.loads(line)["choices"][0]["text"] for line in said.splitlines()]


def test_three_ranks_say_what_one_says(smollm2: Path, tmp_path: Path) -> None:
    """Greedy and seeded, all at once; and again when a rank was killed and the whole replica has come anew."""
    expected = on_one_rank(smollm2, tmp_path)
    with (
        pagoda_serve(smollm2, tmp_path, *COMMON, "--tp", "3", "--served-model-name", "m") as service,
        httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=START_DEADLINE_S) as http,
        ThreadPoolExecutor(len(expected)) as pool,
    ):

        def ask(fields: dict[str, Any]) -> str:
            answer = http.post(COMPLETIONS, json={"model": "m"} | fields)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        def ask_all() -> list[str]:
            return list(pool.map(ask, [{"prompt": prompt} | how for how in SAMPLING for prompt in PROMPTS]))

        service.wait_until_it_says("is served")
        ranks = set(service.processes(RANK))
        assert len(ranks) == 2
        assert ask_all() == expected
        os.kill(min(ranks), signal.SIGKILL)
        wait_until(
            lambda: len(set(service.processes(RANK)) - ranks) == 2 and not ranks & set(service.processes(RANK)),
            "both have been replaced, with their replica",
            deadline_s=START_DEADLINE_S,
        )
        wait_until(lambda: http.get("/health").status_code == 200, "it serves", deadline_s=START_DEADLINE_S)
        assert ask_all() == expected
