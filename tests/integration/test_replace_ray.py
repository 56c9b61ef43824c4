"""All processes of a running service are replaced, on SIGUSR2, under load: nobody who uses it notices."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from local_server import DEADLINE_S, wait_until
from ray_service import (
    COMPLETIONS,
    MODEL,
    START_DEADLINE_S,
    Service,
    endless_stream,
    pagoda_serve,
    short,
    write_endless_model,
)

NUM_CLIENTS = 4
DRAIN_S = 1.0
"""Less than the answers take: what runs on a worker that is replaced goes on at another one."""
LONG = 8000
SHORT = 200
WORKER, INGRESS = "ServeReplica:workers:Worker", "ServeReplica:front:Front"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Service]:
    model = write_endless_model(tmp_path_factory.mktemp("models"), tiny)
    options = ("--workers", "2", "--ingresses", "2", "--threads", "1", "--drain-s", str(DRAIN_S))
    with pagoda_serve(model, tmp_path_factory.mktemp("logs"), *options) as service:
        service.wait_until_it_says("is served at")
        yield service


def long_answer(http: httpx.Client) -> list[int]:
    body = endless_stream("long", temperature=0.0, return_token_ids=True) | {"max_tokens": LONG}
    with http.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200, response.read()
        *lines, done = (line for line in response.iter_lines() if line)
    assert done == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def short_answer(http: httpx.Client, number: int) -> dict[str, Any]:
    answer = http.post(COMPLETIONS, json=short(f"short {number}", max_tokens=SHORT, temperature=0.0, ignore_eos=True))
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_no_request_is_lost(service: Service) -> None:
    """Long streams and short requests all the time: all succeed and say what they said before."""
    replaced = Event()
    old = set(service.processes(WORKER)), set(service.processes(INGRESS))
    assert [len(each) for each in old] == [2, 2]

    def client(number: int) -> int:
        with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=START_DEADLINE_S) as http:
            before, num_requests = short_answer(http, number), 0
            while not replaced.is_set():
                if number == 0:
                    assert len(long_answer(http)) == LONG
                assert short_answer(http, number) == before
                num_requests += 1
            return num_requests

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients: list[Future[int]] = [pool.submit(client, number) for number in range(NUM_CLIENTS)]
        try:
            service.process.send_signal(signal.SIGUSR2)
            service.wait_until_it_says("are replaced")
        finally:
            replaced.set()
        counts = [each.result(START_DEADLINE_S) for each in clients]
    assert all(counts)
    now = set(service.processes(WORKER)), set(service.processes(INGRESS))
    assert not (old[0] & now[0])
    assert len(now[0]) == 2
    assert len(now[1] - old[1]) == 2, "old ingresses may still end their last streams"


def test_ingress_that_dies_leaves_nothing(service: Service) -> None:
    """Both are killed under endless streams: their clients hear of it at once, and the workers end what is nobody's."""
    url = f"http://127.0.0.1:{service.port}"
    wait_until(
        lambda: len(service.processes(INGRESS)) == 2, "the old ingresses have ended", deadline_s=START_DEADLINE_S
    )
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE_S))
        bodies = [endless_stream(f"endless {number}") for number in range(4)]
        streams = [stack.enter_context(http.stream("POST", COMPLETIONS, json=body)) for body in bodies]
        assert [stream.status_code for stream in streams] == [200] * 4
        for ingress in service.processes(INGRESS):
            os.kill(ingress, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                list(stream.iter_lines())

    def answers() -> bool:
        with suppress(httpx.TransportError):
            return httpx.post(f"{url}{COMPLETIONS}", json=short(), timeout=DEADLINE_S).status_code == 200
        return False

    wait_until(answers, "another ingress answers", deadline_s=START_DEADLINE_S)
    wait_until(lambda: is_idle(url), "nothing runs, waits, is held or reserved", deadline_s=START_DEADLINE_S)


def is_idle(url: str) -> bool:
    """Of both workers; an ingress that has just started may not know them all yet."""
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        metrics = http.get("/metrics").text
        stats = http.get("/directory/stats")
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
    heads = tuple(f"pagoda_{name}{{" for name in names)
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith(heads)]
    is_reserved = stats.status_code != 200 or int(stats.json()["reservations"])
    return values == ["0.0"] * 2 * len(names) and not is_reserved


def test_it_ends_without_a_trace(service: Service) -> None:
    service.process.send_signal(signal.SIGTERM)
    service.assert_it_ends_without_a_trace()
    assert MODEL in service.log.read_text()
