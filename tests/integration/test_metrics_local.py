"""`/metrics` and the request log of a real server with a real engine: what moves when, and by how much."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer, serve_locally, tiny_engine_config, wait_until
from prometheus_client.parser import text_string_to_metric_families

from pagoda.cluster.ingress import metrics as ingress_metrics
from pagoda.cluster.ingress.body_limit import MAX_BODY_BYTES
from pagoda.worker import metrics as worker_metrics
from pagoda.worker.config import CacheConfig, SchedulerConfig

MODEL = "tiny"
BLOCK_SIZE = 16
NUM_BLOCKS = 64
LONG = 800
MAX_NUM_SEQS = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEFINITIONS = (*worker_metrics.DEFINITIONS, *ingress_metrics.DEFINITIONS)


@pytest.fixture(scope="module")
def shared_server(tiny: Path) -> Iterator[LocalServer]:
    config = tiny_engine_config(
        tiny,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_waiting=8),
    )
    with serve_locally(config, model_name=MODEL) as server:
        yield server


@pytest.fixture
def server(shared_server: LocalServer, caplog: pytest.LogCaptureFixture) -> Iterator[LocalServer]:
    caplog.set_level(logging.INFO, logger="pagoda")
    yield shared_server
    shared_server.wait_until_idle()


def scrape(server: LocalServer) -> dict[str, float]:
    """Series -> value, such as `request_success_total{finished_reason=stop}`."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("worker", "ingress")}
            shown = "{" + ",".join(f"{name}={value}" for name, value in sorted(labels.items())) + "}" if labels else ""
            found[sample.name.removeprefix("pagoda_") + shown] = sample.value
    return found


def change(server: LocalServer, act: Callable[[], object]) -> dict[str, float]:
    """What moved while `act` ran, other than the requests of `/metrics` itself."""
    before = scrape(server)
    act()
    server.wait_until_idle()
    after = scrape(server)
    changes = {name: after[name] - before.get(name, 0.0) for name in after}
    return {name: by for name, by in changes.items() if by and "/metrics" not in name}


def complete(server: LocalServer, path: str = COMPLETIONS, **fields: Any) -> Any:
    return server.http.post(path, json={"model": MODEL, "temperature": 0, "ignore_eos": True} | fields)


def prompt(first: int, num_tokens: int) -> list[int]:
    return list(range(first, first + num_tokens))


# -- each series moves ---------------------------------------------------------------------------


def test_one_request_moves_exactly_its_series(server: LocalServer) -> None:
    """40 prompt tokens: two full blocks and 8 tokens more. Five tokens of output: five steps, four gaps."""
    moved = change(server, lambda: complete(server, prompt=prompt(1000, 40), max_tokens=5))
    counts = {name: by for name, by in moved.items() if "bucket" not in name and not name.endswith("seconds_sum")}
    assert counts.pop("step_time_seconds_sum{kind=prefill}") > 0
    assert counts.pop("step_time_seconds_sum{kind=decode}") > 0
    assert counts == {
        "prompt_tokens_total": 40,
        "generation_tokens_total": 5,
        "prefix_cache_queries_total": 40,
        "cache_miss_total{reason=never_seen}": 32,
        "cache_miss_total{reason=open_block}": 8,
        "request_success_total{finished_reason=length}": 1,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "request_prefill_time_seconds_count": 1,
        "request_decode_time_seconds_count": 1,
        "step_time_seconds_count{kind=prefill}": 1,
        "step_time_seconds_count{kind=decode}": 4,
        "http_requests_total{path=/v1/completions,status=200}": 1,
    }


def test_intervals_add_up(server: LocalServer) -> None:
    """Queue + prefill = first token; first token + decode = end; decode = all gaps: no second is lost."""
    moved = change(server, lambda: complete(server, prompt=prompt(1100, 40), max_tokens=20))
    total = {name.removesuffix("_seconds_sum"): by for name, by in moved.items() if name.endswith("_seconds_sum")}
    first = total["time_to_first_token"]
    assert total["request_queue_time"] + total["request_prefill_time"] == pytest.approx(first)
    assert first + total["request_decode_time"] == pytest.approx(total["e2e_request_latency"])
    assert total["inter_token_latency"] == pytest.approx(total["request_decode_time"])


def test_second_request_hits(server: LocalServer) -> None:
    complete(server, prompt=prompt(1200, 40), max_tokens=1)
    moved = change(server, lambda: complete(server, prompt=prompt(1200, 40), max_tokens=1))
    assert moved["prefix_cache_hits_total"] == 32
    assert moved["prefix_cache_queries_total"] == 40
    assert moved["cache_miss_total{reason=open_block}"] == 8


def test_evicted_prompt_misses_as_evicted(server: LocalServer) -> None:
    """The pool has 64 blocks: a prompt of 63 blocks drives the first one out."""
    complete(server, prompt=prompt(1300, 40), max_tokens=1)
    complete(server, prompt=prompt(5000, 63 * BLOCK_SIZE), max_tokens=1)
    moved = change(server, lambda: complete(server, prompt=prompt(1300, 40), max_tokens=1))
    assert moved["cache_miss_total{reason=evicted}"] >= BLOCK_SIZE


def test_preemption(server: LocalServer) -> None:
    """Four answers grow until the blocks do not suffice for all of them."""
    moved = change(server, lambda: complete(server, prompt=prompt(1400, 40), max_tokens=300, n=4, temperature=1))
    assert moved["num_preemptions_total"] > 0
    assert moved["generation_tokens_total"] == 1200
    assert moved["prompt_tokens_total"] == 40


def test_gauges_and_abort(server: LocalServer) -> None:
    """Five sequences of which four may run; then their client goes."""

    def come_and_go() -> None:
        body = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "n": MAX_NUM_SEQS + 1, "ignore_eos": True}
        with server.send(COMPLETIONS, body):
            wait_until(lambda: scrape(server)["num_requests_running"] == MAX_NUM_SEQS, "four sequences run")
            found = scrape(server)
            assert found["num_requests_waiting"] >= 1
            assert 0 < found["kv_cache_usage_ratio"] <= 1

    moved = change(server, come_and_go)
    assert moved["request_success_total{finished_reason=abort}"] == MAX_NUM_SEQS + 1
    assert not {"num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"} & moved.keys()
    assert moved[f"http_requests_total{{path={COMPLETIONS},status=499}}"] == 1


def test_failed_step_ends_with_an_error(server: LocalServer) -> None:
    def fail() -> None:
        server.make_steps_fail(RuntimeError("no memory"), times=1)
        complete(server, prompt="a")

    moved = change(server, fail)
    assert moved["request_success_total{finished_reason=error}"] == 1
    assert moved[f"http_requests_total{{path={COMPLETIONS},status=500}}"] == 1


def test_stop_token(server: LocalServer) -> None:
    moved = change(server, lambda: complete(server, prompt=[5], stop_token_ids=list(range(49152))))
    assert moved["request_success_total{finished_reason=stop}"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_stop_string(server: LocalServer, stream: bool, num_samples: int) -> None:
    """Found by the ingress, and the worker counts it as what it is; blocks come back, and stay in the cache."""
    fields = {"prompt": prompt(1500, 40), "n": num_samples, "max_tokens": LONG, "stream": stream}
    text = complete(server, **fields | {"max_tokens": 40, "stream": False}).json()["choices"][0]["text"]
    moved = change(server, lambda: complete(server, **fields, stop=text[10:20]))
    assert moved["request_success_total{finished_reason=stop}"] == num_samples
    assert "request_success_total{finished_reason=abort}" not in moved
    assert moved["prefix_cache_hits_total"] >= 32
    assert moved["generation_tokens_total"] < LONG
    moved = change(server, lambda: complete(server, **fields | {"max_tokens": 1, "stream": False}))
    assert moved["prefix_cache_hits_total"] >= 32


def test_requests_that_no_worker_sees(server: LocalServer) -> None:
    """Paths that a client makes up are one series, however many they are."""

    def ask() -> None:
        for number in range(3):
            server.http.get(f"/made/up/{number}")
        server.http.get("/v1/models/unknown")
        server.http.post(CHAT, content=b"{")
        server.http.post(COMPLETIONS, content=b"{", headers={"X-Request-Id": "not one"})
        server.http.post(COMPLETIONS, content=b" " * (MAX_BODY_BYTES + 1))

    assert change(server, ask) == {
        "http_requests_total{path=other,status=404}": 3,
        "http_requests_total{path=/v1/models/{model:path},status=404}": 1,
        f"http_requests_total{{path={CHAT},status=400}}": 1,
        f"http_requests_total{{path={COMPLETIONS},status=400}}": 1,
        f"http_requests_total{{path={COMPLETIONS},status=413}}": 1,
    }


def test_exposition_is_complete_and_documented(server: LocalServer) -> None:
    """Every metric of worker and ingress, each with its help text, type and labels, and nothing else."""
    server.http.get("/health")
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    found = {f"{family.name}{'_total' if family.type == 'counter' else ''}": family for family in families}
    assert found.keys() == {definition.name for definition in DEFINITIONS}
    for definition in DEFINITIONS:
        family = found[definition.name]
        assert (family.type, family.documentation) == (definition.kind, definition.help)
        process = "ingress" if definition in ingress_metrics.DEFINITIONS else "worker"
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {process, *definition.labels}


# -- the request log -----------------------------------------------------------------------------


def request_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "pagoda.cluster.ingress.request_log"]


def fields_of(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_one_line_for_a_request(server: LocalServer, caplog: pytest.LogCaptureFixture, path: str, stream: bool) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": [7] * 20}
    answer = complete(server, path, max_tokens=4, n=2, stream=stream, **body)
    wait_until(lambda: len(request_lines(caplog)) > 0, "the request is logged")
    (line,) = request_lines(caplog)
    fields = fields_of(line)
    assert line.startswith(f"POST {path} 200 id={json.loads(answer.text.split('data: ')[stream].strip())['id']} ")
    assert (fields["output"], fields["finish"]) == ("8", "length")
    assert int(fields["prompt"]) > int(fields["cached"]) >= 0
    assert 0 < float(fields["ttft_ms"]) <= float(fields["duration_ms"])


def test_line_of_a_client_that_goes(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    with server.send(COMPLETIONS, body) as connection:
        assert connection.recv(1000)
    server.wait_until_idle()
    wait_until(lambda: len(request_lines(caplog)) > 0, "the request is logged")
    (line,) = request_lines(caplog)
    assert 0 < int(fields_of(line)["output"]) < LONG
    assert fields_of(line)["finish"] == "unfinished"


BAD_BODIES = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"model": "tiny"}',
    b'{"model": "tiny", "prompt": "\xc3"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": -1}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 1e400}',
    b'{"model": "tiny", "prompt": [999999999]}',
    b'{"model": "another", "prompt": "a"}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "n": 0}',
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:40]))
def test_clients_mistake_leaves_no_stack_trace(
    server: LocalServer, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    """One line each, at info, and nothing louder."""
    answers = [server.http.post(path, content=body) for path in (CHAT, COMPLETIONS)]
    assert all(400 <= answer.status_code < 500 for answer in answers)
    wait_until(lambda: len(request_lines(caplog)) == 2, "both requests are logged")
    assert all(re.fullmatch(r"POST \S+ 4\d\d duration_ms=[\d.]+", line) for line in request_lines(caplog))
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]


def test_client_that_announces_a_body_and_goes(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    with server.send(COMPLETIONS, {}) as connection:
        assert b" 400 " in connection.recv(1000)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    wait_until(lambda: len(request_lines(caplog)) == 2, "both requests are logged")
    assert " 499 " in request_lines(caplog)[1]
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]


def test_probes_are_quiet(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    """They come every few seconds; at debug they show."""
    server.http.get("/health")
    server.http.get("/metrics")
    server.http.get("/v1/models")
    wait_until(lambda: len(request_lines(caplog)) == 1, "one request is logged")
    assert request_lines(caplog)[0].startswith("GET /v1/models 200 ")


def test_made_up_path_cannot_forge_a_line(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    server.http.get("/a%0Ab")
    wait_until(lambda: len(request_lines(caplog)) == 1, "the request is logged")
    assert "\n" not in request_lines(caplog)[0]
