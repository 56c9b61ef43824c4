"""TLS for the public ports: a HAProxy of our own in front of Ray Serve's, which has no setting for it.

    client ── TLS ──► this HAProxy (host:port) ── 127.0.0.1 ──► Serve's HAProxy ──► ingress

It passes bytes on and understands none. When its files change, as they do when a certificate is renewed, a new process
takes over, and the old one ends with its last connection.
"""

import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.worker.errors import ConfigError, PagodaError

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = 1.0
_START_LIMIT_S = 10.0
_TRY_PERIOD_S = 0.02
_HANDSHAKE_S = 10
_CONFIG = """\
global
    maxconn {max_connections}
    nbthread {num_threads}
    ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets
defaults
    mode tcp
    maxconn {max_connections}
    timeout connect 5s
    # Of the handshake; after that the one behind decides how long a client may be silent.
    timeout client {handshake_s}s
    timeout server {handshake_s}s
    timeout tunnel 24h
"""
_LISTENER = """\
listen {name}
    bind {address} ssl crt {certificate} alpn {protocol}{client_check}
    server serve 127.0.0.1:{inner_port}
"""


class TlsFrontError(PagodaError):
    """HAProxy does not start."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server."""

    certificate: Path
    """With those that lead to its authority behind it."""
    key: Path
    client_authority: Path | None = None
    """Clients must show a certificate of one of these; None asks for none."""

    def check(self) -> None:
        """Raise `ConfigError` naming the setting whose file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for setting, path in (("tls_cert", self.certificate), ("tls_key", self.key)):
            if not path.is_file():
                raise ConfigError(setting, f"there is no file {path}")
        try:
            context.load_cert_chain(self.certificate, self.key, password=b"")
        except (OSError, ValueError) as error:  # of which ssl.SSLError is one
            raise ConfigError("tls_cert", f"{self.certificate} with {self.key}: {error}") from error
        if self.client_authority is not None:
            try:
                context.load_verify_locations(self.client_authority)
            except OSError as error:
                raise ConfigError("tls_client_ca", f"{self.client_authority}: {error}") from error

    def signature(self) -> tuple[int, ...]:
        """Differs once a file has changed. Raises `OSError`."""
        paths = (self.certificate, self.key, *((self.client_authority,) if self.client_authority else ()))
        return tuple(number for path in paths for number in (path.stat().st_mtime_ns, path.stat().st_size))


@dataclass(frozen=True, slots=True)
class TlsListener:
    """One public port and what lies behind it."""

    name: str
    address: str
    """host:port."""
    protocol: str
    """As ALPN calls it: http/1.1 or h2."""
    inner_port: int


class TlsFront:
    """Runs from `start` to `close`; what dies in between is started again."""

    def __init__(
        self,
        binary: str,
        scratch: Path,
        files: TlsFiles | None,
        listeners: Sequence[TlsListener],
        *,
        max_connections: int,
    ) -> None:
        """`scratch` is a folder that nobody else can read, there until `close`. Without `files` nothing is done."""
        self._binary = binary
        self._scratch = scratch
        self._files = files
        self._listeners = tuple(listeners)
        self._max_connections = max_connections
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._signature: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._watch, args=(files,), name="tls-front", daemon=True)

    def start(self) -> None:
        """Listen; returns once clients can come. Raises `TlsFrontError` and `ConfigError`."""
        if self._files is None:
            return
        self._replace(self._files)
        for listener in self._listeners:
            _wait_until_open(listener.address)
        self._thread.start()

    def close(self) -> None:
        """End it and its connections."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _watch(self, files: TlsFiles) -> None:
        while not self._ended.wait(_LOOK_PERIOD_S):
            assert self._process is not None
            status = self._process.poll()
            if status == 0:
                return  # it was told to end with its last connection
            try:
                has_changed = files.signature() != self._signature
                if status is None and not has_changed:
                    continue
                logger.warning("TLS: %s", "its files have changed" if status is None else f"HAProxy ended: {status}")
                self._replace(files)
            except (PagodaError, OSError) as error:
                logger.error("TLS stays as it was: %s", error)
                if status is not None:
                    self._launch(None)  # with what was written when the files were last good

    def _replace(self, files: TlsFiles) -> None:
        """Start a process, and end the one before once the new one listens."""
        before = self._process if self._process is not None and self._process.poll() is None else None
        self._signature = files.signature()
        files.check()
        config = self._write_config(files)
        command = [self._binary, "-f", str(config)]
        checked = subprocess.run([*command, "-c"], capture_output=True, text=True, timeout=_START_LIMIT_S, check=False)
        if checked.returncode:
            raise TlsFrontError(f"HAProxy refuses its configuration: {checked.stderr.strip()}")
        self._launch(before)

    def _launch(self, before: "subprocess.Popen[bytes] | None") -> None:
        """Start a process with the configuration that is written, which takes over from the one before."""
        command = [self._binary, "-f", str(self._scratch / "tls.cfg")]
        if before is not None:
            command += ["-sf", str(before.pid)]
        self._process = subprocess.Popen([*command, "-db", "-q"], stdin=subprocess.DEVNULL, start_new_session=False)
        if before is not None:
            threading.Thread(target=before.wait, name="tls-front-before", daemon=True).start()

    def _write_config(self, files: TlsFiles) -> Path:
        certificate = self._scratch / "tls.pem"
        certificate.touch(mode=0o600)
        certificate.write_bytes(files.certificate.read_bytes() + b"\n" + files.key.read_bytes())
        authority = self._scratch / "tls-clients.pem"  # a copy: the file's own name may hold what HAProxy cannot read
        if files.client_authority is not None:
            authority.write_bytes(files.client_authority.read_bytes())
        text = _CONFIG.format(
            max_connections=self._max_connections,
            num_threads=max(1, len(self._listeners) - 1),
            handshake_s=_HANDSHAKE_S,
        )
        for listener in self._listeners:
            text += _LISTENER.format(
                name=listener.name,
                address=listener.address,
                protocol=listener.protocol,
                certificate=certificate,
                client_check="" if files.client_authority is None else f" ca-file {authority} verify required",
                inner_port=listener.inner_port,
            )
        config = self._scratch / "tls.cfg"
        config.write_text(text)
        return config


def _wait_until_open(address: str) -> None:
    host, _, port = address.rpartition(":")
    end_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, int(port)), _START_LIMIT_S).close()
        except OSError as error:
            if time.monotonic() > end_s:
                raise TlsFrontError(f"HAProxy does not listen at {address}: {error}") from error
            time.sleep(_TRY_PERIOD_S)
        else:
            return
