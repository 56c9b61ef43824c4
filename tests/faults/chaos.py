"""The chaos runner: breaks clusters in three ways and says whether they kept what they promise.

    fake   16 fake workers, a kill a second for two minutes under requests of all kinds, and more that breaks
    real   3 workers of SmolLM2 in float32, a kill 20 s after each replacement for three minutes
    mixed  a whole service, everything killed, disks full, clients that do everything wrong, for --minutes

Writes build/bench/chaos.json and chaos.svg. Status 1 if a promise was broken: a request lost, an answer wrong,
something leaked or grown. What is going to happen is said before it does; the same --seed does it again.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["GRPC_VERBOSITY"] = "NONE"  # what is killed on purpose is nothing to be told of

from chaos_plan import ChaosPlan, FaultKind
from fake_chaos import run_fake_chaos
from fake_cluster import ClusterShape
from fake_model import write_fake_model
from mixed_chaos import PERIODS_S, run_mixed_chaos
from real_chaos import run_real_chaos

from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE, ModelStore

OUTPUT = Path("build/bench/chaos.json")
SCENARIOS = ("fake", "real", "mixed")
FAKE_S, REAL_S, REAL_PAUSE_S = 120.0, 180.0, 20.0
FAKE_CLIENTS = 32
FAKE_PERIODS_S = {
    FaultKind.KILL_WORKER: 1.0,
    FaultKind.PAUSE_WORKER: 10.0,
    FaultKind.CUT_DIRECTORY: 11.0,
    FaultKind.KILL_DIRECTORY: 17.0,
    FaultKind.SLOW_DIRECTORY: 13.0,
    FaultKind.MUTE_DIRECTORY: 19.0,
    FaultKind.JUMP_CLOCK: 15.0,
}
TOTALS = (
    "failed_requests", "wrong_outputs", "leaked_blocks", "leaked_reservations", "leaked_sequences", "leaked_requests",
    "leaked_tasks", "leaked_files", "num_kills", "num_requests",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--minutes", type=float, default=3.0, help="of the mixed one")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time of the other two")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = options.scenarios or SCENARIOS
    if unknown := set(chosen) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    logging.getLogger("pagoda").setLevel(logging.ERROR)  # a directory's warnings of workers that are killed
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    model = ModelStore(DEFAULT_STORE).fetch(DEFAULT_MODEL, progress=lambda *_: None)
    results: dict[str, dict[str, Any]] = {}
    for scenario in chosen:
        _say(scenario, "begins")
        begin_s = time.monotonic()
        figures, is_kept = asyncio.run(_run(scenario, model, options))
        results[scenario] = {**figures, "duration_s": round(time.monotonic() - begin_s), "is_kept": is_kept}
        _say(scenario, f"promises {'kept' if is_kept else 'BROKEN'}: {json.dumps(results[scenario])}")
        _write(results, options.seed)  # each time, so that whatever comes later loses nothing
        gc.collect()
    print(OUTPUT.read_text(), end="")
    sys.exit(not all(result["is_kept"] for result in results.values()))


async def _run(scenario: str, model: Path, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    def say(what: str) -> None:
        _say(scenario, what)

    folder = OUTPUT.parent
    if scenario == "fake":
        plan = ChaosPlan(options.seed, FAKE_S * options.scale, FAKE_PERIODS_S)
        _tell(plan, say)
        fake_model = write_fake_model(folder.parent / "fake-model", model)
        fake = await run_fake_chaos(fake_model, ClusterShape(), plan, num_clients=FAKE_CLIENTS, say=say)
        return fake.figures(), fake.is_kept
    if scenario == "real":
        say(f"seed {options.seed}: a kill {REAL_PAUSE_S:g} s after each replacement, {REAL_S * options.scale:g} s")
        real = await run_real_chaos(
            DEFAULT_MODEL, seed=options.seed, duration_s=REAL_S * options.scale, pause_s=REAL_PAUSE_S, folder=folder,
            say=say,
        )  # fmt: skip
        return real.figures(), real.is_kept
    plan = ChaosPlan(options.seed, 60 * options.minutes, PERIODS_S)
    _tell(plan, say)
    mixed = await run_mixed_chaos(model, DEFAULT_MODEL, plan, folder=folder, say=say)
    return mixed.figures(), mixed.is_kept


def _tell(plan: ChaosPlan, say: Any) -> None:
    for line in plan.lines():
        say(line)


def _write(results: dict[str, dict[str, Any]], seed: int) -> None:
    """One flat object: what all scenarios come to together, then the figures of each behind its name."""
    totals = {name: sum(int(result.get(name, 0)) for result in results.values()) for name in TOTALS}
    growth = max(float(result.get("rss_growth_ratio", 1.0)) for result in results.values())
    each = {f"{scenario}_{name}": value for scenario, result in results.items() for name, value in result.items()}
    is_kept = all(result["is_kept"] for result in results.values())
    flat = {**totals, "rss_growth_ratio": growth, "is_kept": is_kept, "seed": seed, **each}
    OUTPUT.write_text(json.dumps(flat, indent=2) + "\n")


def _say(scenario: str, what: str) -> None:
    print(f"{scenario:5}  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
