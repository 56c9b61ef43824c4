"""`pagoda top`, `pagoda lookup` and `pagoda directory`, against a service that says what the test tells it to."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.json_format import MessageToDict

from pagoda.cluster.cli import main
from pagoda.proto import directory_pb2 as pb
from pagoda.proto.directory_pb2_grpc import DirectoryStub

PAGODA = Path(sys.executable).with_name("pagoda")


class Service:
    """Answers each path with a status and JSON."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.bodies: list[Any] = []
        self.url = ""


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = service.answers.get(self.path, (404, {"error": {"message": "Not Found"}}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def do_POST(self) -> None:
            service.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        service.url = f"http://127.0.0.1:{server.server_port}"
        yield service
        server.shutdown()
        thread.join(10)


def pagoda(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def stats(**changes: Any) -> Any:
    worker = pb.WorkerStats(
        worker_id="0123456789", is_exact=True, num_blocks_held=[40, 2, 0], num_blocks=100, num_free_blocks=75,
        num_running=3, max_num_seqs=64, num_waiting=1, num_uncached_tokens=1234, placements=7, placed_tokens=100,
        placed_cached_tokens=80,
    )  # fmt: skip
    message = pb.DirectoryStats(
        workers=[worker, pb.WorkerStats(worker_id="other")], placements={"prefix": 5, "load": 2}, placed_tokens=200,
        num_entries=42,
    )  # fmt: skip
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True) | changes


def test_top(service: Service) -> None:
    service.answers["/directory/stats"] = (200, stats())
    result = pagoda("top", "--once", "--url", service.url)
    assert result.exit_code == 0
    assert "2 workers, 42 blocks known" in result.stdout
    assert "load 2, prefix 5" in result.stdout
    row = next(line for line in result.stdout.splitlines() if "01234567" in line)
    assert row.split() == ["01234567", "exact", "3/64", "1", "0", "1,234", "25%", "42", "7", "80%"]
    assert "degraded" in next(line for line in result.stdout.splitlines() if "other" in line)


def test_lookup(service: Service) -> None:
    workers = [
        {"worker_id": "aaaaaaaaaa", "num_tokens": 16, "num_device_tokens": 16, "num_predicted_tokens": 0},
        {"worker_id": "bbbbbbbbbb", "num_tokens": 48, "num_device_tokens": 32, "num_predicted_tokens": 16},
    ]
    service.answers["/directory/lookup"] = (200, {"num_tokens": 50, "workers": workers})
    result = pagoda("lookup", "--url", service.url, "some text")
    assert result.stdout.splitlines() == [
        "50 tokens",
        "bbbbbbbb  holds 48 (32 on the device, 16 below), about to hold 16 more",
        "aaaaaaaa  holds 16",
    ]
    pagoda("lookup", "--url", service.url, "--chat", "some text")
    assert service.bodies == [{"prompt": "some text"}, {"messages": [{"role": "user", "content": "some text"}]}]


@pytest.mark.parametrize("command", [("top", "--once"), ("lookup", "text")])
def test_no_such_service(service: Service, command: tuple[str, ...]) -> None:
    for url, said in (
        ("127.0.0.1:1", "no server answers at http://127.0.0.1:1"),
        (service.url, "answers 404: Not Found"),
    ):
        result = pagoda(*command, "--url", url)
        assert (result.exit_code, result.stdout) == (1, "")
        assert said in result.stderr
    for answer in (b"<html>", b"[]"):
        service.answers = dict.fromkeys(("/directory/stats", "/directory/lookup"), (200, answer))
        assert "is no Pagoda service" in pagoda(*command, "--url", service.url).stderr


def test_directory_alone() -> None:
    """Says where it listens, wants its token, and ends at a signal."""
    command = [PAGODA, "directory", "--port", "0", "--token", "secret"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split(" at ")[1].split()[0]
        with grpc.insecure_channel(address) as channel:
            stub = DirectoryStub(channel)
            assert (
                stub.Stats(pb.StatsRequest(), metadata=[("authorization", "Bearer secret")], timeout=10).workers == []
            )
            with pytest.raises(grpc.RpcError) as error:
                stub.Stats(pb.StatsRequest(), timeout=10)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        taken = pagoda("directory", "--port", address.rpartition(":")[2])
        assert (taken.exit_code, "--port: cannot listen on" in taken.stderr) == (1, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("option", [("--port", "70000"), ("--lease-s", "0")])
def test_bad_options_of_a_directory(option: tuple[str, str]) -> None:
    result = pagoda("directory", *option)
    assert result.exit_code == 1
    assert f"{option[0]}: must be between" in result.stderr
