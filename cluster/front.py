"""The ingress as a Ray Serve deployment: one object behind HTTP and gRPC. Only adapts."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from pagoda.cluster import known_workers
from pagoda.cluster.config import ClusterConfig
from pagoda.cluster.directory.client import DirectoryClient
from pagoda.cluster.directory.publisher import Resolve
from pagoda.cluster.ingress.grpc_api import GrpcApi
from pagoda.cluster.ingress.grpc_errors import status_of
from pagoda.cluster.ingress.grpc_health import GrpcHealth
from pagoda.cluster.ingress.grpc_log import GrpcLog
from pagoda.cluster.ingress.http import build_http_app
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.resuming_client import ResumingClient
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.sessions import WorkerEndpoint, WorkerSessions
from pagoda.cluster.ingress.tenant_registry import TenantRegistry, anybody
from pagoda.cluster.logs import log_through_serve
from pagoda.cluster.placer import Placer
from pagoda.cluster.public_prefixes import tokenised
from pagoda.cluster.tenants_file import TenantsFile
from pagoda.cluster.worker_client import ServeWorkerCalls
from pagoda.proto import inference_pb2 as pb
from pagoda.worker.cluster_tls import ClusterTls
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import PagodaError
from pagoda.worker.tokenizer import Tokenizer

T = TypeVar("T")


class Front:
    """One ingress process. Serve calls the methods of `pagoda.v1.Inference` and `grpc.health.v1.Health` by name."""

    def __init__(
        self,
        config: ClusterConfig,
        limits: EngineLimits,
        token: str,
        workers_app: str,
        directories: Sequence[Resolve],
        tls: ClusterTls | None = None,
    ) -> None:
        """`token` opens the workers' sessions; `workers_app` is the application that the workers belong to."""
        log_through_serve(config.log_level)
        ingress_id = uuid.uuid4().hex
        self._metrics = IngressMetrics(ingress=ingress_id)
        self._config = config
        self._sessions = WorkerSessions(ingress_id, token=token, tls=tls, on_session=known_workers.WORKERS.note_session)
        handle = serve.get_deployment_handle("Worker", app_name=workers_app)
        self._directory = DirectoryClient(directories, token=token, tls=tls) if directories else None
        self._placer = (
            Placer(
                self._directory,
                config.served_model_name,
                lambda: known_workers.WORKERS.hash_domain,
                on_placed=self._metrics.placed,
                is_routable=known_workers.WORKERS.is_usable,
            )
            if self._directory is not None
            else None
        )
        client = ResumingClient(
            ServeWorkerCalls(handle, ingress_id),
            self._sessions,
            limits,
            self._placer,
            on_lost=lambda is_resumed: self._metrics.worker_lost(is_resumed=is_resumed),
        )
        tokenizer = Tokenizer(config.engine.model_path)
        self._service = InferenceService(
            tokenizer,
            client,
            limits,
            max_timeout_s=config.request_timeout_s,
            on_refused=self._metrics.refused,
        )
        self._tenants = None
        if config.tenants_path is not None:

            def declare(file: TenantsFile) -> None:
                self._service.public_prefixes = tokenised(file.public_prefixes, tokenizer)

            self._tenants = TenantRegistry(config.tenants_path, declare)
        self._authenticate = anybody if self._tenants is None else self._tenants.authenticate
        grpc_log = GrpcLog(self._metrics)
        self._grpc = GrpcApi(self._service, config.served_model_name, grpc_log, self._authenticate)
        self._health = GrpcHealth(self._service, grpc_log)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(
            self._service,
            model_name=self._config.served_model_name,
            lifespan=self._lifespan,
            metrics=self._metrics,
            server_sends_request_id=True,
            max_body_bytes=self._config.max_body_bytes,
            directory=self._placer,
            authenticate=self._authenticate,
        )

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncGenerator[None, None]:
        loop = asyncio.get_running_loop()

        def on_workers(workers: frozenset[WorkerEndpoint]) -> None:
            loop.call_soon_threadsafe(self._sessions.set_routable, workers)

        known_workers.WORKERS.listen(on_workers)
        if self._directory is not None:
            self._directory.start()
        first_contact = asyncio.create_task(self._service.is_healthy())  # makes the router, which hears of the workers
        watching = None if self._tenants is None else asyncio.create_task(self._tenants.watch())
        yield
        first_contact.cancel()
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._sessions.shutdown()
        if self._directory is not None:
            await self._directory.close()
        self._service.close()

    async def drain(self, timeout_s: float) -> None:
        """For whoever takes the service down: take no more requests, wait for those that run, abort what is late."""
        await self._service.drain(timeout_s)

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with aclosing(
            _streamed(self._grpc.generate(request, grpc_context.invocation_metadata()), grpc_context)
        ) as responses:
            async for response in responses:
                yield response

    async def Chat(
        self, request: pb.ChatRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with aclosing(
            _streamed(self._grpc.chat(request, grpc_context.invocation_metadata()), grpc_context)
        ) as responses:
            async for response in responses:
                yield response

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        return await _single(
            self._grpc.tokenize(request, grpc_context.invocation_metadata()), grpc_context, pb.TokenizeResponse()
        )

    async def ListModels(
        self, request: pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> pb.ListModelsResponse:
        return await _single(
            self._grpc.list_models(request, grpc_context.invocation_metadata()), grpc_context, pb.ListModelsResponse()
        )

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        return await _single(
            self._grpc.abort(request, grpc_context.invocation_metadata()), grpc_context, pb.AbortResponse()
        )

    async def Check(self, request: HealthCheckRequest, grpc_context: RayServegRPCContext) -> HealthCheckResponse:
        return await _single(self._health.check(request), grpc_context, HealthCheckResponse())

    async def Watch(
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        async with aclosing(_streamed(self._health.watch(request), grpc_context)) as responses:
            async for response in responses:
                yield response


# An error sets the call's status and is not raised: Serve would write a stack trace into its log.


async def _streamed(responses: AsyncGenerator[T, None], context: RayServegRPCContext) -> AsyncGenerator[T, None]:
    try:
        async with aclosing(responses):
            async for response in responses:
                yield response
    except PagodaError as error:
        _set_status(context, error)


async def _single(answer: Awaitable[T], context: RayServegRPCContext, empty: T) -> T:
    """`empty` is sent with an error, and not looked at."""
    try:
        return await answer
    except PagodaError as error:
        _set_status(context, error)
        return empty


def _set_status(context: RayServegRPCContext, error: PagodaError) -> None:
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.details)
    if status.metadata:
        context.set_trailing_metadata([*context.trailing_metadata(), *status.metadata])
