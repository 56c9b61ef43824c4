"""Placement in a real cluster: three workers, two ingresses, two directories, and what happens when these die."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path

import httpx
import pytest
from local_server import DEADLINE_S, wait_until
from ray_service import COMPLETIONS, MODEL, START_DEADLINE_S, Service, pagoda_serve, write_endless_model

NUM_WORKERS = 3
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Service]:
    model = write_endless_model(tmp_path_factory.mktemp("models"), tiny)
    options = ("--workers", str(NUM_WORKERS), "--ingresses", "2", "--directories", "2", "--threads", "1")
    with pagoda_serve(model, tmp_path_factory.mktemp("logs"), *options, "--drain-s", "1") as service:
        service.wait_until_it_says("is served")
        with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=DEADLINE_S) as http:
            wait_until(lambda: knows_everybody(http), "the directory knows all workers")
        yield service


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_keepalive_connections=0)  # so that both ingresses get requests
    with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=DEADLINE_S, limits=limits) as client:
        yield client


def knows_everybody(http: httpx.Client) -> bool:
    """Asked through both ingresses, of which one may reach a directory again before the other does."""
    for _ in range(4):
        answer = http.get("/directory/stats")
        workers = answer.json()["workers"] if answer.status_code == 200 else []
        if len(workers) != NUM_WORKERS or not all(worker["is_exact"] for worker in workers):
            return False
    return True


def prompt(topic: int, num_words: int = 400) -> str:
    return " ".join(f"word{topic} number{index}" for index in range(num_words // 2))


def ask(http: httpx.Client, text: str, max_tokens: int = 2) -> tuple[int, int]:
    """(prompt tokens, those of them that were cached)."""
    answer = http.post(COMPLETIONS, json={"model": MODEL, "prompt": text, "max_tokens": max_tokens, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def all_but_the_last_block(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def series(http: httpx.Client, name: str) -> float:
    """The sum of a counter over all workers."""
    text = http.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


def test_requests_go_to_their_prefix(http: httpx.Client) -> None:
    """Each time, whichever ingress they come through."""
    for topic in range(6):
        assert ask(http, prompt(topic))[1] == 0
    for _ in range(3):
        for topic in range(6):
            num_tokens, num_cached = ask(http, prompt(topic) + " and more")
            assert num_cached >= all_but_the_last_block(num_tokens) - 2 * BLOCK_SIZE
    stats = http.get("/directory/stats").json()
    assert int(stats["placements"]["prefix"]) >= 18


def test_lookup_says_who_holds_it(http: httpx.Client) -> None:
    num_tokens, _ = ask(http, prompt(20))
    held = [0, 0, num_tokens // BLOCK_SIZE * BLOCK_SIZE]

    def all_is_known() -> bool:
        answer = http.post("/directory/lookup", json={"prompt": prompt(20)}).json()
        assert answer["num_tokens"] == num_tokens
        return sorted(worker["num_tokens"] for worker in answer["workers"]) == held

    wait_until(all_is_known, "the directory has heard of it")


def test_a_burst_with_one_prefix_computes_it_once_per_worker(http: httpx.Client) -> None:
    """64 at once through two ingresses, before anybody has announced a block."""
    text = prompt(40, num_words=1200)
    before = [series(http, f"pagoda_prefix_cache_{name}_total") for name in ("queries", "hits")]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda number: ask(http, f"{text} {number}"), range(64)))
    queries, hits = (
        series(http, f"pagoda_prefix_cache_{name}_total") - count
        for name, count in zip(("queries", "hits"), before, strict=True)
    )
    workers = http.post("/directory/lookup", json={"prompt": text}).json()["workers"]
    num_used = sum(worker["num_tokens"] > 0 for worker in workers)
    num_tokens = answers[0][0]
    own_tokens = 64 * 2 * BLOCK_SIZE  # what is behind the last block that all have in common
    assert num_used >= 1
    assert queries - hits <= 1.1 * num_used * num_tokens + own_tokens


def directories_of(service: Service) -> list[int]:
    return service.processes("ray::DirectoryActor")


def test_directories_that_die_fail_nobody(service: Service, http: httpx.Client) -> None:
    """Requests go on meanwhile, and once they are back so are the hits."""
    ask(http, prompt(60))
    assert len(directories_of(service)) == 2
    killed = set(directories_of(service))
    for process in killed:
        os.kill(process, signal.SIGKILL)
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:
        ask(http, prompt(61))
    wait_until(lambda: len(set(directories_of(service)) - killed) == 2, "they are started again")
    wait_until(lambda: knows_everybody(http), "they know everybody again", deadline_s=START_DEADLINE_S)
    num_tokens, num_cached = ask(http, prompt(60))
    assert num_cached >= all_but_the_last_block(num_tokens)


def test_directory_that_hangs_delays_nobody(service: Service, http: httpx.Client) -> None:
    """It costs hits, not seconds."""
    hanging = directories_of(service)
    for process in hanging:
        os.kill(process, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for number in range(10):
            ask(http, f"short {number}")
        assert time.monotonic() - begin < 10.0
    finally:
        for process in hanging:
            os.kill(process, signal.SIGCONT)
    wait_until(lambda: knows_everybody(http), "they know everybody again", deadline_s=START_DEADLINE_S)


def test_worker_that_dies_is_forgotten(service: Service, http: httpx.Client) -> None:
    wait_until(lambda: knows_everybody(http), "the directory knows all workers", deadline_s=START_DEADLINE_S)
    before = {worker["worker_id"] for worker in http.get("/directory/stats").json()["workers"]}
    victim = service.processes("ServeReplica:workers:Worker")[0]
    os.kill(victim, signal.SIGKILL)

    def is_replaced() -> bool:
        answer = http.get("/directory/stats")
        now = {worker["worker_id"] for worker in answer.json()["workers"]} if answer.status_code == 200 else set()
        return len(now) == NUM_WORKERS and len(now & before) == NUM_WORKERS - 1

    wait_until(is_replaced, "another worker has taken its place", deadline_s=START_DEADLINE_S)
    topics = count(70)

    def repeats_hit() -> bool:
        """Not before both ingresses have heard of the new worker, which Serve tells them one after the other."""
        answers = []
        for topic in islice(topics, 6):
            ask(http, prompt(topic))
            answers.append(ask(http, prompt(topic)))
        return all(num_cached >= all_but_the_last_block(num_tokens) for num_tokens, num_cached in answers)

    wait_until(repeats_hit, "requests go to their prefix again")


def test_it_ends_without_a_trace(service: Service) -> None:
    service.process.send_signal(signal.SIGTERM)
    service.assert_it_ends_without_a_trace()
