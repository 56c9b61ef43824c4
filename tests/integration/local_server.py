"""The HTTP API over an engine in this process: a real server on a loopback port, without a cluster."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from pagoda.cluster.ingress.http import build_http_app
from pagoda.cluster.ingress.local import LocalWorkerClient
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.tenant_registry import TenantRegistry
from pagoda.cluster.public_prefixes import tokenised
from pagoda.cluster.tenants_file import TenantsFile
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.config import EngineConfig
from pagoda.worker.tokenizer import Tokenizer

DEADLINE_S = 30.0
MAX_TIMEOUT_S = 600.0
"""Of requests."""


def wait_until(is_so: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Return once `is_so()`; fail if that takes too long."""
    end = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.005)


def send_request(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request was sent, for clients that go away; not even its status is read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )
    return connection


class LocalServer:
    """A running server, with clients. Tests look into its engine, never at a clock."""

    def __init__(
        self,
        engine: AsyncEngine,
        service: InferenceService,
        loop: asyncio.AbstractEventLoop,
        port: int,
        tenants: TenantRegistry | None = None,
    ) -> None:
        self._tenants = tenants
        self.engine = engine
        self._service = service
        self._loop = loop
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)
        self.openai = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=self.http
        )

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        return send_request(self.port, path, body)

    def drain(self, timeout_s: float) -> "Future[None]":
        """Begin to stop, as `pagoda serve` does when it is interrupted. Done when nothing runs any more."""
        return asyncio.run_coroutine_threadsafe(self._service.drain(timeout_s), self._loop)

    def read_tenants_again(self) -> None:
        """As a service does every second, if the file has changed."""
        assert self._tenants is not None
        asyncio.run_coroutine_threadsafe(self._tenants.refresh(), self._loop).result(DEADLINE_S)

    @property
    def num_sequences(self) -> int:
        stats = self.engine.stats()
        return stats.num_running + stats.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs or waits and every block is free."""
        pool = self.engine._engine._scheduler.manager.pool
        return self.num_sequences == 0 and pool.num_free == pool.num_blocks

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.is_idle, "no sequence is left and all blocks are free")

    def make_steps_fail(self, error: Exception, *, times: int = 1_000_000) -> None:
        """The next `times` steps raise `error` instead of computing anything."""
        executor = self.engine._engine._executor
        execute, left = executor.execute, times

        def fail_or_execute(plan: Any) -> Any:
            nonlocal left
            if left > 0:
                left -= 1
                raise error
            return execute(plan)

        executor.execute = fail_or_execute


@contextmanager
def serve_locally(config: EngineConfig, *, model_name: str, tenants_path: Path | None = None) -> Iterator[LocalServer]:
    """Load an engine and serve it until the end of the block; for everybody if there is no file of tenants."""
    engine = AsyncEngine(config, progress=lambda *_: None)
    metrics = IngressMetrics(ingress="local")
    tokenizer = Tokenizer(config.model_path)
    service = InferenceService(
        tokenizer,
        LocalWorkerClient(engine),
        engine.limits,
        max_timeout_s=MAX_TIMEOUT_S,
        on_refused=metrics.refused,
    )

    def declare(file: TenantsFile) -> None:
        service.public_prefixes = tokenised(file.public_prefixes, tokenizer)

    tenants = None if tenants_path is None else TenantRegistry(tenants_path, declare)
    app = build_http_app(
        service,
        model_name=model_name,
        metrics=metrics,
        **({} if tenants is None else {"authenticate": tenants.authenticate}),
    )
    # The socket listens before the server runs, so that no request can come too early.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        loop: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            loop.set_result(asyncio.get_running_loop())
            await server.serve([listener])

        def run() -> None:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run, name="uvicorn")
        thread.start()
        local = LocalServer(engine, service, loop.result(DEADLINE_S), listener.getsockname()[1], tenants)
        try:
            yield local
        finally:
            local.http.close()
            server.should_exit = True
            thread.join(DEADLINE_S)
            service.close()
            engine.shutdown()
    assert not thread.is_alive()


def tiny_engine_config(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(folder, device="cpu", num_threads=1, **changes)
