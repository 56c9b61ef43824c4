"""`pagoda serve --tp 2` in a real cluster: each worker is two actors of one placement group, which die together.

Without a model, so that nothing but the ranks is tested.
"""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from select import select

import httpx
import pytest
from local_server import DEADLINE_S, send_request, wait_until
from ray_service import (
    COMPLETIONS,
    START_DEADLINE_S,
    Service,
    endless_stream,
    pagoda_serve,
    short,
    write_endless_model,
)

NUM_WORKERS, NUM_RANKS = 2, 2
WORKER, RANK = "ServeReplica:workers:Worker", "ray::RankActor"
NUM_QUEUED = 12


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Service]:
    """Each worker runs one request at a time."""
    model = write_endless_model(tmp_path_factory.mktemp("models"), tiny)
    sizes = ("--workers", str(NUM_WORKERS), "--tp", str(NUM_RANKS), "--max-num-seqs", "1", "--drain-s", "1")
    with pagoda_serve(model, tmp_path_factory.mktemp("logs"), "--fake", *sizes) as service:
        service.wait_until_it_says(f"in {NUM_WORKERS} workers of {NUM_RANKS} ranks")
        service.wait_until_it_says("is served")
        yield service


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=START_DEADLINE_S) as client:
        yield client


def series(http: httpx.Client, name: str) -> list[float]:
    """A metric of each worker."""
    return [float(v) for v in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)]


def processes(service: Service) -> tuple[set[int], set[int]]:
    """(replicas, ranks beside them)."""
    return set(service.processes(WORKER)), set(service.processes(RANK))


def wait_until_replaced(service: Service, http: httpx.Client, workers: set[int], ranks: set[int]) -> None:
    """One of these replicas and its rank are gone, both; others have come, and answer."""

    def is_replaced() -> bool:
        now = processes(service)
        return all(
            len(new) == NUM_WORKERS and len(new - old) == 1 for new, old in zip(now, (workers, ranks), strict=True)
        )

    wait_until(is_replaced, "another replica with its rank has come", deadline_s=START_DEADLINE_S)
    wait_until(
        lambda: len(series(http, "pagoda_num_requests_running")) == NUM_WORKERS,
        "the ingress knows it",
        deadline_s=START_DEADLINE_S,
    )
    assert http.post(COMPLETIONS, json=short()).status_code == 200


def test_both_workers_answer(http: httpx.Client) -> None:
    """A greedy prompt gets the same answer from either."""

    def ask(number: int) -> str:
        answer = http.post(COMPLETIONS, json=short(f"{number} red", temperature=0))
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        answers = [list(pool.map(ask, range(16))) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 16
    counts = series(http, "pagoda_generation_tokens_total")
    assert len(counts) == NUM_WORKERS
    assert all(counts)


def test_ranks_are_set_up_as_their_replicas_are(service: Service) -> None:
    """Threads that spin while they wait for each other would take the cores that others need."""
    workers, ranks = processes(service)
    assert (len(workers), len(ranks)) == (NUM_WORKERS, NUM_WORKERS * (NUM_RANKS - 1))
    for process in workers | ranks:
        assert b"OMP_WAIT_POLICY=passive" in Path(f"/proc/{process}/environ").read_bytes()


def test_rank_that_dies_takes_its_worker_along_and_no_request_that_waits(service: Service, http: httpx.Client) -> None:
    """Two endless streams hold both workers. Behind them wait others, when a rank of one worker is killed.

    Who waits there is served by the other worker.
    """
    workers, ranks = processes(service)
    with ExitStack() as stack, ThreadPoolExecutor(NUM_QUEUED) as pool:
        streams = [
            stack.enter_context(send_request(service.port, COMPLETIONS, endless_stream(f"stream {number}")))
            for number in range(4)
        ]
        # The first bytes of an answer come with its first token.
        wait_until(lambda: len(select(streams, [], [], 0)[0]) == 2, "both workers are busy")
        waiting = [pool.submit(http.post, COMPLETIONS, json=short(f"{number} waits")) for number in range(NUM_QUEUED)]
        wait_until(lambda: sum(series(http, "pagoda_num_requests_waiting")) == NUM_QUEUED + 2, "all others wait")
        assert all(count > 1 for count in series(http, "pagoda_num_requests_waiting"))
        os.kill(min(ranks), signal.SIGKILL)
        wait_until(lambda: len(workers & processes(service)[0]) == 1, "its replica has ended")
        assert not any(answer.done() for answer in waiting)
        for stream in streams:
            stream.close()
        assert [answer.result(START_DEADLINE_S).status_code for answer in waiting] == [200] * NUM_QUEUED
    wait_until_replaced(service, http, workers, ranks)


def test_replica_that_dies_takes_its_rank_along(service: Service, http: httpx.Client) -> None:
    """Killed, it can tell nobody."""
    workers, ranks = processes(service)
    os.kill(min(workers), signal.SIGKILL)
    wait_until(lambda: len(ranks & processes(service)[1]) == 1, "its rank has ended", deadline_s=DEADLINE_S)
    wait_until_replaced(service, http, workers, ranks)


def test_who_waits_for_a_worker_is_told_that_the_service_stops(service: Service, http: httpx.Client) -> None:
    """Scenario: every worker is gone, and the service is stopped before another one has come.

    Then it ends without a trace.
    """
    workers, _ = processes(service)
    for process in workers:
        os.kill(process, signal.SIGKILL)
    with ThreadPoolExecutor(3) as pool:
        wait_until(lambda: not workers & processes(service)[0], "all workers are gone")
        waiting = [pool.submit(http.post, COMPLETIONS, json=short(f"{number} waits")) for number in range(3)]
        assert http.get("/v1/models").status_code == 200  # by when they have come too
        service.process.send_signal(signal.SIGTERM)
        answers = [answer.result(START_DEADLINE_S) for answer in waiting]
    assert [answer.status_code for answer in answers] == [503] * 3
    service.assert_it_ends_without_a_trace()
