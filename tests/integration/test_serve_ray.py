"""`pagoda serve` as a user runs it: the real command, a Ray cluster of its own, real clients, and no trace afterwards.

What the API answers is tested without a cluster; here is what only the cluster can get wrong.
"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_server import DEADLINE_S, send_request, wait_until
from ray_service import (
    CHAT,
    COMPLETIONS,
    DRAIN_S,
    MODEL,
    START_DEADLINE_S,
    STOP_DEADLINE_S,
    Service,
    endless_stream,
    last_event_of,
    pagoda_serve,
    short,
    write_endless_model,
)

from pagoda.proto import inference_pb2, inference_pb2_grpc

ODD_ENVIRONMENT = {"RAY_ADDRESS": "127.0.0.1:1", "OMP_WAIT_POLICY": "active"}
"""What a user's shell may hold, and the service must not heed: a cluster, here one that does not even run, and a policy
of torch's threads."""
CLIENT_TIMEOUT_S = 60.0
"""How long a client may keep the rest of its request for itself."""
HALF_A_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: half\r\n"
MAX_NUM_WAITING = 8


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("models"), tiny)


@pytest.fixture(scope="module")
def service(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two workers that run one sequence each; so two endless requests leave no room for any other."""
    sizes = ("--workers", "2", "--max-num-seqs", "1", "--max-num-waiting", str(MAX_NUM_WAITING))
    folder = tmp_path_factory.mktemp("logs")
    options = (*sizes, "--drain-s", str(DRAIN_S))
    with pagoda_serve(endless, folder, *options, environment=ODD_ENVIRONMENT) as service:
        service.wait_until_it_says(f"{MODEL} is served at http://127.0.0.1:{service.port}/v1")
        with socket.create_connection(("127.0.0.1", service.port)) as service.silent:
            service.silent.sendall(HALF_A_REQUEST)
            service.silent_since = time.monotonic()
            yield service


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def client(service: Service, http: httpx.Client) -> openai.OpenAI:
    url = f"http://127.0.0.1:{service.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


# -- processes -----------------------------------------------------------------------------------


def environment_of(process: int) -> dict[str, str]:
    variables = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def test_cluster_of_the_environment_is_not_joined(service: Service) -> None:
    """Only `--ray-address` names a cluster to serve on. Without it, whatever RAY_ADDRESS says, one is started here."""
    assert environment_of(service.process.pid)["RAY_ADDRESS"] == ODD_ENVIRONMENT["RAY_ADDRESS"]
    assert len(service.processes("raylet/raylet")) == 1


def test_threads_of_workers_give_way(service: Service) -> None:
    """Threads that spin while they wait for each other would take the cores that the ingress needs."""
    workers = set(service.processes("ServeReplica:workers:Worker"))
    assert len(workers) == 2
    assert [environment_of(worker)["OMP_WAIT_POLICY"] for worker in workers] == ["passive"] * 2


def test_nothing_runs_that_serves_nobody(service: Service) -> None:
    """Ray's dashboard, its scaling of clusters and Serve's root of the workers cost a model on the CPU its cores."""
    for unwanted in ("dashboard/dashboard.py", "monitor.py", "WorkersRoot"):
        assert not service.processes(unwanted), unwanted


# -- answers -------------------------------------------------------------------------------------


def test_chat_and_completions(client: openai.OpenAI) -> None:
    """Streamed and not, through the proxy, the ingress and a worker."""
    chat: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 20,
        "seed": 1,
    }
    whole = client.chat.completions.create(**chat)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    chunks = list(client.chat.completions.create(**chat, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    completion = client.completions.create(**short(max_tokens=20, seed=1))
    chunks_of_text = list(client.completions.create(**short(max_tokens=20, seed=1, stream=True)))
    assert "".join(chunk.choices[0].text for chunk in chunks_of_text) == completion.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]


def test_log_probabilities_come_from_the_worker(http: httpx.Client) -> None:
    """Of prompt and output, for each sample."""
    fields = {"n": 2, "logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 1, "logit_bias": {"5": 1}}
    for _ in range(2):
        answer = http.post(COMPLETIONS, json=short("Once upon a time", **fields)).json()
        for choice in answer["choices"]:
            assert len(choice["logprobs"]["token_logprobs"]) == 3
            assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 0}])
@pytest.mark.parametrize("request_id", ["job-7", None])
def test_request_id_is_in_the_answer_once(http: httpx.Client, request_id: str | None, fields: dict[str, Any]) -> None:
    """Serve sends the header by itself; the ingress must not send it a second time."""
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    response = http.post(COMPLETIONS, json=short(**fields), headers=headers)
    (found,) = response.headers.get_list("X-Request-Id")
    assert request_id in (None, found)
    if response.status_code == 200:
        assert f"cmpl-{found}" in response.text


def test_same_seed_same_answer_on_any_worker(client: openai.OpenAI) -> None:
    """More requests at once than the workers run; they wait, and each gets the answer that it gets alone."""

    def text(seed: int) -> str:
        return client.completions.create(**short(max_tokens=30, seed=seed)).choices[0].text

    alone = {seed: text(seed) for seed in range(3)}
    seeds = [number % 3 for number in range(12)]
    with ThreadPoolExecutor(len(seeds)) as pool:
        assert list(pool.map(text, seeds)) == [alone[seed] for seed in seeds]


@pytest.mark.parametrize(
    ("path", "content", "status", "param", "code"),
    [
        (CHAT, b"{", 400, "body", None),
        (CHAT, b"", 400, "body", None),
        (COMPLETIONS, json.dumps(short(model="gpt-4o")).encode(), 404, "model", "model_not_found"),
        (COMPLETIONS, json.dumps(short(temperature=float("nan"))).encode(), 400, "temperature", None),
        (COMPLETIONS, json.dumps(short(max_tokens=10**9)).encode(), 400, "max_tokens", None),
        ("/v1/embeddings", b"{}", 404, None, None),
    ],
)
def test_bad_request(
    http: httpx.Client, path: str, content: bytes, status: int, param: str | None, code: str | None
) -> None:
    """Errors keep their shape on their way through Serve's proxy; the next request is answered."""
    response = http.post(path, content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert http.post(COMPLETIONS, json=short()).status_code == 200


def test_nothing_is_logged_by_default(service: Service, http: httpx.Client) -> None:
    """Neither good requests nor bad ones: there are only the command's own lines about how far it is."""
    assert http.post(COMPLETIONS, json=short()).status_code == 200
    assert http.post(COMPLETIONS, json=short(n=0)).status_code == 400
    lines = service.log.read_text().splitlines()
    assert len(lines) == 3
    assert all(re.match(r"\[ *\d+\.\d s\] (starting Ray|loading|endless is served at)", line) for line in lines)


def test_overload(http: httpx.Client) -> None:
    """A worker's refusal arrives as such: its status, when to try again, one line, nothing of how we are built."""
    with ExitStack() as stack:
        for number in range(3):
            stream = http.stream("POST", COMPLETIONS, json=endless_stream(f"crowd {number}", n=MAX_NUM_WAITING))
            response = stack.enter_context(stream)
            if response.status_code != 200:
                break
        assert response.status_code == 429
        error = json.loads(response.read())["error"]
        assert error["code"] == "overloaded"
        assert "\n" not in error["message"]
        assert response.headers["retry-after"] == "1"
    assert http.post(COMPLETIONS, json=short()).status_code == 200


def test_more_than_all_workers_take_at_once(service: Service, http: httpx.Client) -> None:
    """Each worker runs one and lets eight wait; whoever comes then, be it in the same moment, is refused at once."""
    num_taken = 2 * (1 + MAX_NUM_WAITING)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(send_request(service.port, COMPLETIONS, endless_stream(f"rush {number}")))
            for number in range(60)
        ]
        wait_until(lambda: len(select(clients, [], [], 0)[0]) == 60 - num_taken + 2, "the others are answered")
        statuses = sorted(client.recv(12) for client in select(clients, [], [], 0)[0])
        assert statuses == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 429"] * (60 - num_taken)
    assert http.post(COMPLETIONS, json=short()).status_code == 200


# -- clients that go away, workers that die ------------------------------------------------------


def test_clients_that_go_leave_room(service: Service, http: httpx.Client) -> None:
    """Endless requests hold both workers' only places, streamed, and unstreamed behind them. Their clients go.

    Only if every one of them is aborted is a later request ever answered.
    """
    with ExitStack() as stack:
        streams = [
            stack.enter_context(send_request(service.port, COMPLETIONS, endless_stream(f"stream {number}")))
            for number in range(4)
        ]
        # The first bytes of an answer come with its first token.
        wait_until(lambda: len(select(streams, [], [], 0)[0]) == 2, "both workers are busy")
        for number in range(4):
            whole = endless_stream(f"whole {number}") | {"stream": False}
            stack.enter_context(send_request(service.port, COMPLETIONS, whole))
    assert http.post(COMPLETIONS, json=short()).status_code == 200


def test_clients_that_go_while_they_wait(service: Service, http: httpx.Client) -> None:
    """Scenario: clients time out that sent head and body apart, as HTTP libraries do, and are owed a whole answer.

    HAProxy would not see them go if it spliced bodies. Engines hold two of the answers and the others wait, for ever.
    """

    def give_up(number: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://127.0.0.1:{service.port}{COMPLETIONS}",
                json=endless_stream(f"given up {number}") | {"stream": False},
                timeout=httpx.Timeout(DEADLINE_S, read=1.0),
            )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(give_up, range(16)))
    assert http.post(COMPLETIONS, json=short()).status_code == 200


def workers_of(service: Service) -> set[int]:
    workers = set(service.processes("ServeReplica:workers:Worker"))
    assert len(workers) == 2
    return workers


LONG = 8_000
"""Tokens, which take some seconds: long enough to kill workers under it."""


def long_stream(**fields: Any) -> dict[str, Any]:
    return endless_stream("tell me", return_token_ids=True, **fields) | {"max_tokens": LONG}


def tokens_of(lines: Iterable[str]) -> Iterator[list[int]]:
    """The tokens of each event of a stream, which ends properly."""
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event["choices"][0]["token_ids"]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
def test_workers_that_die_under_a_stream_are_not_noticed(
    service: Service, http: httpx.Client, fields: dict[str, float]
) -> None:
    """Both are killed, one after the other's replacement: the client reads one stream, and what a quiet run says."""

    def tokens(num_kills: int) -> list[int]:
        found: list[int] = []
        with http.stream("POST", COMPLETIONS, json=long_stream(**fields), timeout=START_DEADLINE_S) as response:
            for new in tokens_of(response.iter_lines()):
                found += new
                if num_kills and len(found) > 500:
                    num_kills -= 1
                    for worker in workers_of(service):
                        os.kill(worker, signal.SIGKILL)
        return found

    undisturbed = tokens(0)
    assert len(undisturbed) == LONG
    assert tokens(1) == undisturbed
    wait_until(lambda: has_workers(http, 2), "both are replaced", deadline_s=START_DEADLINE_S)
    assert service.process.poll() is None


def test_nor_under_a_grpc_stream(service: Service, http: httpx.Client) -> None:
    message = inference_pb2.GenerateRequest(
        model=MODEL,
        text="tell me",
        sampling=inference_pb2.Sampling(temperature=0.0, max_tokens=LONG // 2, ignore_eos=True),
    )

    def tokens(*, kills: bool) -> list[int]:
        found: list[int] = []
        with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
            for response in inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=START_DEADLINE_S):
                found += response.token_ids
                if kills and len(found) > 500:
                    kills = False
                    for worker in workers_of(service):
                        os.kill(worker, signal.SIGKILL)
        return found

    undisturbed = tokens(kills=False)
    assert len(undisturbed) == LONG // 2
    assert tokens(kills=True) == undisturbed
    wait_until(lambda: has_workers(http, 2), "both are replaced", deadline_s=START_DEADLINE_S)


def test_worker_that_hangs_is_noticed(service: Service, http: httpx.Client) -> None:
    """By its session, long before Serve gives it up: the other worker goes on with the stream, whichever hangs."""
    wait_until(lambda: has_workers(http, 2), "both workers are there", deadline_s=START_DEADLINE_S)
    with http.stream("POST", COMPLETIONS, json=long_stream(), timeout=START_DEADLINE_S) as response:
        tokens = tokens_of(response.iter_lines())
        num_tokens = len(next(tokens))
        for worker in workers_of(service):
            os.kill(worker, signal.SIGSTOP)
            try:
                num_before = num_tokens
                while num_tokens < num_before + 1000:
                    num_tokens += len(next(tokens))
            finally:
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGCONT)
        assert num_tokens + sum(map(len, tokens)) == LONG


def has_workers(http: httpx.Client, count: int) -> bool:
    """Whether so many can be reached, and none beside them."""
    return http.get("/metrics").text.count("\npagoda_num_requests_running{") == count


# -- clients, proxies and the end ----------------------------------------------------------------


def test_half_a_request_is_not_waited_for_longer(service: Service) -> None:
    """Its client is let go: it would hold a connection for ever.

    Not before: when the set of ingresses changes, as just after the start, one HAProxy takes over from another, and
    what came over the old one goes on there.
    """
    assert service.silent is not None
    service.silent.settimeout(CLIENT_TIMEOUT_S + 10)
    answer = service.silent.recv(1000)
    assert not answer or answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - service.silent_since > CLIENT_TIMEOUT_S - 5


def test_proxy_that_dies_is_replaced(service: Service) -> None:
    """Serve itself does not notice, and the service would be there and unreachable for ever."""
    assert_proxy_answers(service)
    for proxy in service.processes("haproxy\0-db"):
        os.kill(proxy, signal.SIGKILL)
    assert_proxy_answers(service)


def assert_proxy_answers(service: Service) -> None:
    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{service.port}/health", timeout=DEADLINE_S).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, "the proxy answers", deadline_s=START_DEADLINE_S)


def test_terminate_drains(service: Service, http: httpx.Client) -> None:
    """SIGTERM, as a service manager sends it: new requests are refused, what runs ends properly or is told why not.

    The last of the tests that need the running service.
    """
    scratch = service.scratch_folder()
    assert scratch.exists()
    with ExitStack() as stack:
        short_one, endless_one = (
            stack.enter_context(http.stream("POST", COMPLETIONS, json=body))
            for body in (short(max_tokens=300, stream=True, ignore_eos=True), endless_stream())
        )
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/health").status_code == 503, "the service says that it stops")
        refused = http.post(COMPLETIONS, json=short())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "stopping" in refused.json()["error"]["message"]
        with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="a"), timeout=DEADLINE_S))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("retry-after", "1") in error.value.trailing_metadata()
        assert last_event_of(short_one)["choices"][0]["finish_reason"] == "length"
        assert "aborted" in last_event_of(endless_one)["error"]["message"]
    service.process.wait(STOP_DEADLINE_S)
    service.assert_it_ends_without_a_trace()
    assert not scratch.exists()
