"""Metrics and logs of a cluster with two workers and two ingress processes: complete and the same wherever one asks."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from local_server import DEADLINE_S, wait_until
from prometheus_client.parser import text_string_to_metric_families
from test_serve_ray import Service, pagoda_serve
from tiny_model import write_tiny_model

MODEL = "small"
NUM_REQUESTS = 12
NUM_TOKENS = 5

Series = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("models")
    model = write_tiny_model(folder / MODEL, tokenizer_from=tiny, max_position=2048)
    with pagoda_serve(model, folder, "--workers", "2", "--ingresses", "2", "--log-level", "info") as service:
        service.wait_until_it_says(f"{MODEL} is served at")
        yield service


def scrape(service: Service) -> Series:
    """(name, process) -> value, summed over other labels. A connection of its own, so that any ingress may answer."""
    answer = httpx.get(f"http://127.0.0.1:{service.port}/metrics", timeout=DEADLINE_S)
    assert answer.status_code == 200
    found: Series = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.labels.get("path", "/v1/completions") == "/v1/completions":
                key = (sample.name, sample.labels.get("worker") or sample.labels["ingress"])
                found[key] = found.get(key, 0.0) + sample.value
    return found


def processes(series: Series, name: str) -> dict[str, float]:
    return {process: value for (sample, process), value in series.items() if sample == name}


def complete(service: Service, **fields: object) -> int:
    body = {"model": MODEL, "prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True} | fields
    return httpx.post(f"http://127.0.0.1:{service.port}/v1/completions", json=body, timeout=DEADLINE_S).status_code


def test_every_ingress_shows_all_workers(service: Service) -> None:
    assert [complete(service) for _ in range(NUM_REQUESTS)] == [200] * NUM_REQUESTS
    assert complete(service, max_tokens=-1) == 400
    requests: dict[str, float] = {}

    def both_ingresses_have_answered() -> bool:
        found = scrape(service)
        assert not any(processes(found, "pagoda_worker_scrape_failures_total").values())
        workers = processes(found, "pagoda_generation_tokens_total")
        assert len(workers) == 2
        assert sum(workers.values()) == NUM_REQUESTS * NUM_TOKENS
        assert sum(processes(found, "pagoda_e2e_request_latency_seconds_count").values()) == NUM_REQUESTS
        requests.update(processes(found, "pagoda_http_requests_total"))
        (ingress,) = processes(found, "pagoda_worker_scrape_failures_total")
        requests.setdefault(ingress, 0.0)
        return len(requests) == 2

    wait_until(both_ingresses_have_answered, "both ingress processes have answered")
    assert sum(requests.values()) == NUM_REQUESTS + 1


def test_one_line_for_each_request_and_no_stack_trace(service: Service) -> None:
    """At level info they show where `pagoda serve` runs; the last test sent these."""

    def lines(status: int) -> list[str]:
        return [line for line in service.log.read_text().splitlines() if f"POST /v1/completions {status}" in line]

    wait_until(lambda: len(lines(200)) == NUM_REQUESTS and len(lines(400)) == 1, "all requests are logged")
    assert all(f"output={NUM_TOKENS}" in line for line in lines(200))
    assert "Traceback" not in service.log.read_text()


def test_dead_worker_does_not_keep_the_others_from_being_scraped(service: Service) -> None:
    """Serve starts another one, which is in as soon as it is known. The last test of this service."""
    before = processes(scrape(service), "pagoda_generation_tokens_total")
    victim, _ = set(service.processes("ServeReplica:workers:Worker"))
    os.kill(victim, signal.SIGKILL)
    is_gone = False

    def there_are_two_again() -> bool:
        nonlocal is_gone
        workers = processes(scrape(service), "pagoda_generation_tokens_total")
        is_gone = is_gone or len(workers) == 1
        return is_gone and len(workers) == 2

    wait_until(there_are_two_again, "the new worker is scraped", deadline_s=120)
    assert len(processes(scrape(service), "pagoda_generation_tokens_total").keys() & before.keys()) == 1
