"""TLS in front of the public ports, and between the processes of a cluster; here without a cluster."""

import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import Authority
from local_server import DEADLINE_S, wait_until
from ray.serve._private.haproxy import get_haproxy_binary
from ray_service import free_port

from pagoda.cluster import tls_front
from pagoda.cluster.directory.server import DirectoryServer
from pagoda.cluster.tls_front import TlsFiles, TlsFront, TlsListener
from pagoda.proto import directory_pb2, directory_pb2_grpc
from pagoda.worker.cluster_tls import ClusterTls, dial, make_cluster_tls
from pagoda.worker.errors import ConfigError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"inner")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def inner_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@contextmanager
def front(folder: Path, files: TlsFiles, inner_port: int) -> Iterator[tuple[TlsFront, int]]:
    scratch, port = folder / "scratch", free_port()
    scratch.mkdir()
    listener = TlsListener("http", f"127.0.0.1:{port}", "http/1.1", inner_port)
    running = TlsFront(get_haproxy_binary(), scratch, files, [listener], max_connections=100)
    running.start()
    with closing(running):
        assert is_open(port), "it has started, so clients can come"
        yield running, port


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def trusting(authority: Authority, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.path)
    if own is not None:
        context.load_cert_chain(*own)
    return context


def get(port: int, context: ssl.SSLContext) -> str:
    with httpx.Client(verify=context, timeout=DEADLINE_S) as client:
        return client.get(f"https://127.0.0.1:{port}/").text


def serial(port: int, authority: Authority) -> str:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as raw:
        with trusting(authority).wrap_socket(raw, server_hostname="localhost") as secure:
            return str(secure.getpeercert()["serialNumber"])  # type: ignore[index]


# -- public ports --------------------------------------------------------------------------------


def test_only_tls_gets_through(tmp_path: Path, authority: Authority, inner_port: int) -> None:
    with front(tmp_path, TlsFiles(*authority.issue("server")), inner_port) as (_, port):
        assert get(port, trusting(authority)) == "inner"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/", timeout=DEADLINE_S)
        stranger = Authority(tmp_path, "stranger")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(port, trusting(stranger))


def test_clients_must_show_a_certificate_where_one_is_asked_for(
    tmp_path: Path, authority: Authority, inner_port: int
) -> None:
    stranger = Authority(tmp_path, "stranger")
    files = TlsFiles(*authority.issue("server"), client_authority=authority.path)
    with front(tmp_path, files, inner_port) as (_, port):
        assert get(port, trusting(authority, authority.issue("client"))) == "inner"
        for own in (None, stranger.issue("thief")):
            with pytest.raises(httpx.TransportError):
                get(port, trusting(authority, own))


def test_who_does_not_shake_hands_is_let_go(
    tmp_path: Path, authority: Authority, inner_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thousand silent connections would be all that fit."""
    monkeypatch.setattr(tls_front, "_HANDSHAKE_S", 1)
    with front(tmp_path, TlsFiles(*authority.issue("server")), inner_port) as (_, port):
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as silent:
            assert silent.recv(1) == b""


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, authority: Authority, inner_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection from before goes on."""
    monkeypatch.setattr(tls_front, "_LOOK_PERIOD_S", 0.01)
    files = TlsFiles(*authority.issue("server"))
    with front(tmp_path, files, inner_port) as (_, port):
        with httpx.Client(verify=trusting(authority), timeout=DEADLINE_S) as kept:
            assert kept.get(f"https://127.0.0.1:{port}/").text == "inner"
            before = serial(port, authority)
            authority.issue("server")
            wait_until(lambda: serial(port, authority) != before, "the new certificate is shown")
            assert kept.get(f"https://127.0.0.1:{port}/").text == "inner"
        files.certificate.write_text("broken")
        assert get(port, trusting(authority)) == "inner"


def test_a_process_that_dies_is_replaced(
    tmp_path: Path, authority: Authority, inner_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_front, "_LOOK_PERIOD_S", 0.01)
    with front(tmp_path, TlsFiles(*authority.issue("server")), inner_port) as (running, port):
        process = running._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: running._process is not process and is_open(port), "another one listens")
        assert get(port, trusting(authority)) == "inner"


def test_a_process_that_dies_while_the_files_are_broken_is_replaced_as_it_was(
    tmp_path: Path, authority: Authority, inner_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_front, "_LOOK_PERIOD_S", 0.01)
    files = TlsFiles(*authority.issue("server"))
    with front(tmp_path, files, inner_port) as (running, port):
        process = running._process
        assert process is not None
        files.certificate.write_text("broken")
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: running._process is not process and is_open(port), "another one listens")
        assert get(port, trusting(authority)) == "inner"


def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("server")
    _, other_key = authority.issue("other")
    broken = tmp_path / "broken.pem"
    broken.write_text("no PEM")
    for files, setting in (
        (TlsFiles(tmp_path / "none", key), "tls_cert"),
        (TlsFiles(certificate, tmp_path / "none"), "tls_key"),
        (TlsFiles(certificate, other_key), "tls_cert"),
        (TlsFiles(broken, key), "tls_cert"),
        (TlsFiles(certificate, key, broken), "tls_client_ca"),
    ):
        with pytest.raises(ConfigError) as caught:
            files.check()
        assert caught.value.setting == setting


# -- inner ports ---------------------------------------------------------------------------------


async def stats(address: str, tls: ClusterTls | None) -> directory_pb2.DirectoryStats:
    async with dial(address, tls) as channel:
        stub = directory_pb2_grpc.DirectoryStub(channel)
        metadata = (("authorization", "Bearer token"),)
        return await stub.Stats(directory_pb2.StatsRequest(), metadata=metadata, timeout=5, wait_for_ready=False)


async def test_only_processes_of_the_cluster_are_heard() -> None:
    """The token alone opens nothing: not in the clear, not with a certificate of another start, not with none."""
    tls, other = make_cluster_tls(), make_cluster_tls()
    server = DirectoryServer(token="token", tls=tls)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        assert (await stats(address, tls)).directory_id
        forged = ClusterTls(tls.authority, other.certificate, other.key)
        for wrong in (None, other, forged):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stats(address, wrong)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop()


def test_keys_are_not_in_what_is_printed() -> None:
    tls = make_cluster_tls()
    assert tls.key.decode().splitlines()[1] not in repr(tls)
