"""`pagoda serve` with keys and TLS, on Ray, as a user and as somebody who should not be there."""

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import yaml
from certificates import Authority
from local_server import DEADLINE_S, wait_until
from ray_service import COMPLETIONS, MODEL, PAGODA, Service, pagoda_serve, short, write_endless_model

from pagoda.cluster.tenants_file import hash_of_key
from pagoda.proto import inference_pb2 as pb
from pagoda.proto.inference_pb2_grpc import InferenceStub

PUBLIC = " ".join(f"public {n}" for n in range(40))
LISTENING = "0A"
UNPICKLING = (
    "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.serve.ASGIService/HandleRequest",
    "/ray.serve.ASGIService/HandleRequestWithRejection",
)
KEYS = {"alice": "key of alice", "bob": "key of bob", "root": "key of root"}
TENANTS: dict[str, Any] = {
    "tenants": [
        {"name": name, "keys": [hash_of_key(key)], "secret": f"{name:*>32}", "operator": name == "root"}
        for name, key in KEYS.items()
    ],
    "public_prefixes": [PUBLIC],
}


@dataclass
class Guarded:
    """A service with keys and TLS, and what one needs to reach it."""

    service: Service
    authority: Authority
    file: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.service.port}"

    def post(self, name: str, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS.get(name, name)}"}
        with httpx.Client(verify=ssl.create_default_context(cafile=self.authority.path), timeout=DEADLINE_S) as client:
            return client.post(f"{self.url}{path}", json=body, headers=headers)

    def num_cached(self, name: str, prompt: str) -> int:
        answer = self.post(name, COMPLETIONS, short(prompt))
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def num_held(self, name: str, prompt: str) -> int:
        """Tokens that some worker holds, as the directory tells this tenant."""
        answer = self.post(name, "/directory/lookup", {"prompt": prompt})
        assert answer.status_code == 200, answer.text
        return max((int(worker["num_tokens"]) for worker in answer.json()["workers"]), default=0)

    def grpc(self) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.authority.path.read_bytes())
        return grpc.secure_channel(f"127.0.0.1:{self.service.grpc_port}", credentials)

    def run(self, *arguments: str, key: str = "root") -> str:
        """A command of `pagoda`, with a key."""
        command = [PAGODA, *arguments, "--api-key", KEYS[key], "--ca-cert", self.authority.path]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input="Hello\n")
        assert answer.returncode == 0, answer.stderr
        return answer.stdout


@pytest.fixture(scope="module")
def guarded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("security")
    authority = Authority(folder, "authority")
    certificate, key = authority.issue("server")
    file = folder / "tenants.yaml"
    file.write_text(yaml.safe_dump(TENANTS))
    model = write_endless_model(folder, tiny)
    options = ["--tenants", file, "--tls-cert", certificate, "--tls-key", key, "--max-model-len", "4096"]
    with pagoda_serve(model, folder, *map(str, options)) as service:
        service.wait_until_it_says("is served at https://")
        yield Guarded(service, authority, file)


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS.get(name, name)}"),)


def test_http_wants_tls_and_a_key(guarded: Guarded) -> None:
    with httpx.Client(verify=ssl.create_default_context(cafile=guarded.authority.path), timeout=DEADLINE_S) as client:
        assert client.get(f"{guarded.url}/health").status_code == 200
        refusal = client.get(f"{guarded.url}/v1/models")
        assert refusal.status_code == 401
        assert refusal.json()["error"]["code"] == "invalid_api_key"
        sdk = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEYS["alice"], http_client=client, max_retries=0)
        assert [model.id for model in sdk.models.list()] == [MODEL]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{guarded.service.port}/health", timeout=DEADLINE_S)


def test_grpc_wants_tls_and_a_key(guarded: Guarded) -> None:
    request = pb.GenerateRequest(model=MODEL, text="a", sampling=pb.Sampling(max_tokens=2, ignore_eos=True))
    with guarded.grpc() as channel:
        stub = InferenceStub(channel)
        *_, last = stub.Generate(request, metadata=metadata("alice"), timeout=DEADLINE_S)
        assert last.usage.completion_tokens == 2
        for wrong in ((), metadata("nobody's")):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListModels(pb.ListModelsRequest(), metadata=wrong, timeout=DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            # Just after a start Serve's own proxy is in between, which loses the status of a stream without messages.
            messages: list[pb.GenerateResponse] = []
            with suppress(grpc.RpcError):
                messages += stub.Generate(request, metadata=wrong, timeout=DEADLINE_S)
            assert not messages
    with grpc.insecure_channel(f"127.0.0.1:{guarded.service.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            InferenceStub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata("alice"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_stranger_cannot_fill_the_memory_by_grpc(guarded: Guarded) -> None:
    """A message is held, and parsed, before anybody can ask for a key; by default Serve takes 2 GiB."""
    with guarded.grpc() as channel:
        request = pb.TokenizeRequest(model=MODEL, text="x" * (5 * 2**20))
        with pytest.raises(grpc.RpcError) as caught:
            InferenceStub(channel).Tokenize(request, timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_nobody_ends_anothers_request(guarded: Guarded) -> None:
    request = pb.GenerateRequest(model=MODEL, text="a", sampling=pb.Sampling(max_tokens=3000, ignore_eos=True))
    with guarded.grpc() as channel:
        stub = InferenceStub(channel)
        responses = stub.Generate(request, metadata=metadata("alice"), timeout=DEADLINE_S)
        request_id = next(responses).request_id
        stub.Abort(pb.AbortRequest(request_id=request_id), metadata=metadata("bob"), timeout=DEADLINE_S)
        for _ in range(20):
            next(responses)
        stub.Abort(pb.AbortRequest(request_id=request_id), metadata=metadata("alice"), timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(responses)
        assert caught.value.code() is grpc.StatusCode.ABORTED


def test_no_tenant_finds_anothers_blocks(guarded: Guarded) -> None:
    """Not at a worker, and not at the directory, which would say so by where a request goes, too."""
    prompt = f"{PUBLIC} " + " ".join(f"secret {n}" for n in range(40))
    assert guarded.num_cached("alice", prompt) == 0
    wait_until(lambda: guarded.num_held("alice", prompt) > 0, "the directory has heard of Alice's blocks")
    num_public = guarded.num_held("bob", prompt)
    num_all = guarded.num_held("alice", prompt)
    assert 0 < num_public < num_all
    assert guarded.num_cached("bob", prompt) == num_public
    assert guarded.num_cached("alice", prompt) > num_public


def test_commands_bring_their_key(guarded: Guarded) -> None:
    assert "1 workers" in guarded.run("top", "--once", "--url", guarded.url)
    assert "tokens" in guarded.run("lookup", "a", "--url", guarded.url, key="alice")
    guarded.run("chat", "--url", guarded.url, "--max-tokens", "3", key="alice")
    output = ["--output", str(guarded.file.with_name("load.json")), "--no-ideal"]
    load = ["bench", "random", "--concurrency", "1", "--sessions", "1", "--output-tokens", "2", *output]
    guarded.run(*load, "--url", guarded.url, key="alice")
    guarded.run(*load, "--grpc", f"127.0.0.1:{guarded.service.grpc_port}", key="alice")


def test_only_an_operator_sees_all(guarded: Guarded) -> None:
    with httpx.Client(verify=ssl.create_default_context(cafile=guarded.authority.path), timeout=DEADLINE_S) as client:
        for name, status in (("alice", 403), ("root", 200)):
            headers = {"Authorization": f"Bearer {KEYS[name]}"}
            for path in ("/metrics", "/directory/stats"):
                assert client.get(f"{guarded.url}{path}", headers=headers).status_code == status


def listening_ports(service: Service) -> set[int]:
    """Of the service's processes, those that other machines can reach."""
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENING and not address.endswith("7F"):  # an address ends with its first byte
                ports[f"socket:[{fields[9]}]"] = int(port, 16)
    found = set()
    for pid in service.processes():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found.add(ports.get(str(link.readlink())))
    return {port for port in found if port is not None}


def status(port: int, method: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=5)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_whatever_unpickles_wants_the_token(guarded: Guarded) -> None:
    """Ray and Serve listen on all addresses, and unpickle what comes: nobody else is heard, on whatever port."""
    ports = listening_ports(guarded.service)
    for method in UNPICKLING:
        answers = {status(port, method) for port in ports}
        assert grpc.StatusCode.UNAUTHENTICATED in answers, method
        assert grpc.StatusCode.OK not in answers, method


def test_other_ports_know_no_secret(guarded: Guarded) -> None:
    """Serve's own gRPC ports cannot be told to listen to this machine only: the API behind them wants a key too."""
    answers = {status(port, "/pagoda.v1.Inference/ListModels") for port in listening_ports(guarded.service)}
    assert grpc.StatusCode.UNAUTHENTICATED in answers
    assert grpc.StatusCode.OK not in answers


def test_a_key_that_is_removed_ends_within_seconds(guarded: Guarded) -> None:
    """Last, for it is not given back."""
    assert guarded.post("bob", COMPLETIONS, short()).status_code == 200
    alice, _, root = TENANTS["tenants"]
    guarded.file.write_text(yaml.safe_dump(TENANTS | {"tenants": [alice, root]}))
    wait_until(lambda: guarded.post("bob", COMPLETIONS, short()).status_code == 401, "Bob's key ends", deadline_s=10)
    assert guarded.post("alice", COMPLETIONS, short()).status_code == 200
