"""Our engine on the CPU against the machine's floor and, with --peer, against vLLM's CPU build, all in one run.

Writes build/bench/cpu.json, one flat object metric -> number, and a chart beside it. `..._ratio` says how many times
as fast as the peer we are; `step_over_floor_...` how long a step takes over the floor (below 1: faster than oneDNN's
products); `step_over_memory_...` the same over reading every weight and every KV byte once at the memory's speed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pagoda.worker.model_store import ModelStore

OUTPUT = Path("build/bench/cpu.json")
MODEL = "smollm2-135m"
HERE = Path(__file__).parent
RATES = ("decode_b1_tok_s", "decode_b8_tok_s", "decode_b32_tok_s", "decode_b32_ctx1000_tok_s")
TIMES = ("prefill_512_s", "prefill_2048_s")
MEAN_CONTEXT = 16 + 128 // 2
"""Of the short decodes, tokens."""


def run(python: Path, script: str, model: Path, num_threads: int) -> dict[str, float]:
    """What a script of this folder reports."""
    print(f"{script} ({python})", file=sys.stderr, flush=True)
    process = subprocess.run(
        [str(python), str(HERE / script), str(model), str(num_threads)], stdout=subprocess.PIPE, text=True, check=True
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def over_floor(ours: Mapping[str, float], floor: Mapping[str, float]) -> dict[str, float]:
    result = {}
    for count in (1, 8, 32):
        step_ms = count * 1e3 / ours[f"decode_b{count}_tok_s"]
        kv_ms = count * MEAN_CONTEXT * floor["kv_bytes_per_token"] / floor["read_gb_s"] / 1e6
        result[f"step_over_floor_b{count}"] = step_ms / (floor[f"gemm_b{count}_ms"] + kv_ms)
        result[f"step_over_memory_b{count}"] = step_ms / (floor["weights_gb"] / floor["read_gb_s"] * 1e3 + kv_ms)
    return result


def over_peer(ours: Mapping[str, float], peer: Mapping[str, float]) -> dict[str, float]:
    rates = {f"{name.removesuffix('_tok_s')}_ratio": ours[name] / peer[name] for name in RATES}
    return rates | {f"{name.removesuffix('_s')}_ratio": peer[name] / ours[name] for name in TIMES}


def draw(ours: Mapping[str, float], peer: Mapping[str, float] | None, path: Path) -> None:
    """Bars side by side: tokens per second, and prompt tokens per second of the prefills."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    def heights(engine: Mapping[str, float]) -> list[float]:
        return [engine[name] for name in RATES] + [int(name.split("_")[1]) / engine[name] for name in TIMES]

    names = ["decode, 1", "decode, 8", "decode, 32", "32 x 1,000 + 64", "prefill 512", "prefill 2,048"]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    engines = [("Pagoda", ours)] + ([("vLLM", peer)] if peer else [])
    width = 0.8 / len(engines)
    for position, (label, engine) in enumerate(engines):
        bars = axes.bar([x + position * width for x in range(len(names))], heights(engine), width, label=label)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks([x + width * (len(engines) - 1) / 2 for x in range(len(names))], names)
    axes.set_yscale("log")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{MODEL}, bfloat16, {os.cpu_count()} cores")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, help="virtual environment with vLLM's CPU build")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    model = ModelStore(Path.home() / ".cache/pagoda/models").path_of(MODEL)
    python = Path(sys.executable)
    runs = [run(python, "cpu_engine.py", model, arguments.threads)]
    floor = run(python, "cpu_floor.py", model, arguments.threads)
    peer = run(arguments.peer / "bin" / "python", "cpu_peer.py", model, arguments.threads) if arguments.peer else None
    # Once more at the end: the speed of a shared machine's memory changes by half within minutes.
    runs.append(run(python, "cpu_engine.py", model, arguments.threads))
    ours = {name: statistics.mean(one[name] for one in runs) for name in runs[0]}
    result = ours | over_floor(ours, floor) | {f"floor_{name}": value for name, value in floor.items()}
    if peer:
        result |= {f"peer_{name}": value for name, value in peer.items()} | over_peer(ours, peer)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=2) + "\n")
    draw(ours, peer, OUTPUT.with_suffix(".png"))
    print(OUTPUT.read_text(), end="")


if __name__ == "__main__":
    main()
