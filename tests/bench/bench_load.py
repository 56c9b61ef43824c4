"""The load generator at work: build/bench/load.json, .requests.jsonl and .html.

First how much of one core it needs itself, with 500 streams of 20 tokens/s from a server that only streams
(client_500_...); then a minute of conversations with a service as `make serve` starts it: all of `pagoda bench chat`.
"""

import json
import subprocess
import sys
from pathlib import Path

from service import serve

from pagoda.worker.model_store import DEFAULT_MODEL

OUTPUT = Path("build/bench/load.json")
HERE = Path(__file__).parent
PAGODA = Path(sys.executable).with_name("pagoda")
NUM_STREAMS, TOKENS_PER_S, STREAMS_S = 500, 20, 20


def bench(*arguments: str) -> None:
    print(f"pagoda bench {' '.join(arguments)}", file=sys.stderr, flush=True)
    subprocess.run([str(PAGODA), "bench", *arguments], check=True)


def client_alone() -> dict[str, float]:
    """One core for the client, the other for the server."""
    output = OUTPUT.with_name("load_client.json")
    command = [sys.executable, str(HERE / "token_server.py"), str(TOKENS_PER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        length = ["--input-tokens", "16", "--output-tokens", str(TOKENS_PER_S * STREAMS_S)]
        pace = ["--concurrency", str(NUM_STREAMS), "--sessions", str(NUM_STREAMS)]
        bench("random", "--url", url, *length, *pace, "--no-ideal", "--output", str(output))
        server.terminate()
    summary = json.loads(output.read_text())
    assert summary["failed_requests"] == 0
    return {
        "client_500_streams_cpu_ratio": summary["client_cpu_ratio"],
        "client_500_streams_lag_p99_ms": summary["client_lag_p99_ms"],
        "client_500_streams_tokens_per_s": summary["output_tokens_per_s"],
        "client_500_streams_is_bottleneck": summary["client_is_bottleneck"],
    }


def main() -> None:
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    alone = client_alone()
    with serve(DEFAULT_MODEL) as service:
        html = OUTPUT.with_suffix(".html")
        url = f"http://127.0.0.1:{service.port}"
        pace = ["--rate", "0.3", "--duration-s", "60"]
        bench("chat", "--url", url, *pace, "--output", str(OUTPUT), "--html", str(html))
    summary = json.loads(OUTPUT.read_text())
    OUTPUT.write_text(json.dumps(summary | alone, indent=2) + "\n")


if __name__ == "__main__":
    main()
