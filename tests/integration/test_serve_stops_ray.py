"""How `pagoda serve` starts, refuses to, and stops, whoever tells it to: nothing may stay behind."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from local_server import DEADLINE_S, send_request, wait_until
from ray_service import (
    COMPLETIONS,
    PAGODA,
    START_DEADLINE_S,
    STOP_DEADLINE_S,
    assert_port_is_free,
    endless_stream,
    free_port,
    last_event_of,
    pagoda_serve,
    write_endless_model,
)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("models"), tiny)


def run_serve(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """A `pagoda serve` that must end by itself, and soon."""
    return subprocess.run([PAGODA, "serve", *options], capture_output=True, text=True, timeout=60, check=False)


def run_pagoda_serve(*options: str | Path) -> str:
    """What a `pagoda serve` that must fail says; it must not have started Ray."""
    result = run_serve(*options)
    assert result.returncode == 1
    assert "Ray" not in result.stderr
    return result.stderr


def test_port_in_use(endless: Path) -> None:
    """Said at once, not after a minute."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = run_pagoda_serve("--model", endless, "--port", str(port))
    assert said == f"Error: --port: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_port_that_is_taken_meanwhile(endless: Path, tmp_path: Path) -> None:
    """Two services may be started at once. Ray Serve says only that its proxy has crashed."""
    with pagoda_serve(endless, tmp_path) as service:
        service.wait_until_it_says("starting Ray")
        with socket.create_server(("127.0.0.1", service.port)):
            assert service.process.wait(START_DEADLINE_S) == 1
        said = service.log.read_text()
    assert f"Error: --port: cannot listen on 127.0.0.1:{service.port}: Address already in use\n" in said
    assert "Traceback" not in said
    assert not service.processes()


def test_model_path_that_does_not_exist(tmp_path: Path) -> None:
    said = run_pagoda_serve("--model", tmp_path / "missing", "--port", str(free_port()))
    assert said == f"Error: {tmp_path / 'missing'}: not a Hugging Face model folder: it has no config.json\n"


def test_ray_cluster_that_does_not_answer(endless: Path) -> None:
    """Ray itself would look for it for minutes, deaf to Ctrl-C. The port is taken, and nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        ports = ("--port", str(free_port()), "--grpc-port", str(free_port()))
        result = run_serve("--model", endless, *ports, "--kv-cache-gib", "0.3", "--ray-address", address)
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert last.startswith(f"Error: --ray-address: {address} does not answer: ")
    assert "Traceback" not in result.stderr


def test_ctrl_c_while_it_starts(endless: Path, tmp_path: Path) -> None:
    """A terminal sends SIGINT to every process of the group, the ones that Ray starts too."""
    with pagoda_serve(endless, tmp_path) as service:
        service.wait_until_it_says("loading")
        os.killpg(service.process.pid, signal.SIGINT)
        service.assert_it_ends_without_a_trace()


def test_second_ctrl_c_aborts_what_runs(endless: Path, tmp_path: Path) -> None:
    """Whoever does not want to wait for the drain time; clients still hear why."""
    with pagoda_serve(endless, tmp_path, "--drain-s", "600") as service:
        service.wait_until_it_says("is served")
        url = f"http://127.0.0.1:{service.port}{COMPLETIONS}"
        with httpx.stream("POST", url, json=endless_stream(), timeout=DEADLINE_S) as response:
            assert response.status_code == 200
            os.killpg(service.process.pid, signal.SIGINT)
            service.wait_until_it_says("stopping")
            os.killpg(service.process.pid, signal.SIGINT)
            assert "aborted" in last_event_of(response)["error"]["message"]
        service.process.wait(STOP_DEADLINE_S)
        service.assert_it_ends_without_a_trace()


def test_terminate_everything_at_once(endless: Path, tmp_path: Path) -> None:
    """As `timeout` and systemd do: Ray is gone before the service can stop in order, and nothing may stay behind."""
    with pagoda_serve(endless, tmp_path) as service:
        service.wait_until_it_says("is served")
        scratch = service.scratch_folder()
        os.killpg(service.process.pid, signal.SIGTERM)
        assert service.process.wait(STOP_DEADLINE_S) == 1
        assert "Ray has ended, and the service with it" in service.log.read_text()
        wait_until(lambda: not service.processes(), "no process of the service is left")
        assert_port_is_free(service.port)
        assert not scratch.exists()


def test_ctrl_c_while_it_serves(endless: Path, tmp_path: Path) -> None:
    """With a client that does not read its endless answer: it is not waited for."""
    with pagoda_serve(endless, tmp_path, "--drain-s", "1") as service:
        service.wait_until_it_says("is served")
        with send_request(service.port, COMPLETIONS, endless_stream()) as connection:
            assert connection.recv(1000)
            os.killpg(service.process.pid, signal.SIGINT)
            service.process.wait(STOP_DEADLINE_S)
        service.assert_it_ends_without_a_trace()
        assert "(raylet)" not in service.log.read_text()
