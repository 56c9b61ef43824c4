"""Reaches the workers through Ray Serve: the call by Serve, the tokens over the gRPC sessions."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from pagoda.cluster.ingress.sessions import WorkerLostError, WorkerSessions
from pagoda.cluster.placer import Placer
from pagoda.worker.errors import EngineStoppedError, OverloadedError, PagodaError
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.types import FinishReason, Request, RequestId, SequenceOutput

PING_DEADLINE_S = 10.0
MAX_TRIES = 3
"""Workers that a request is tried on if one dies before its first token, or is full: others may have room."""


class WorkerFullError(OverloadedError):
    """The worker that the router chose takes no more; what the router knew of it was old."""


class ServeWorkerClient:
    """Implements `WorkerClient`.

    Each request is one Serve call that lasts as long as the request: so Serve counts it, drains it, and ends it
    when either side dies.
    """

    def __init__(
        self, handle: DeploymentHandle[Any], sessions: WorkerSessions, ingress_id: str, placer: Placer | None = None
    ) -> None:
        """Without a `placer` the router chooses by load alone."""
        self._placer = placer
        self._handle = handle
        # By gRPC and not as a call of a Ray actor, which takes twice the CPU time. As a stream, of which nothing comes
        # but its end, since the router hears whether a unary call by gRPC was accepted only when that has ended.
        self._streaming_handle = handle.options(stream=True, _by_reference=False)
        self._sessions = sessions
        self._ingress_id = ingress_id
        self._unbegun: dict[RequestId, tuple[PendingOutputs, int]] = {}
        """Requests of which nothing has come yet, perhaps since no worker has taken them; with their samples."""

    async def ping(self) -> None:
        await asyncio.wait_for(self._handle.ping.remote(), PING_DEADLINE_S)

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        failed: set[str] = set()
        try:
            for tries_left in reversed(range(MAX_TRIES)):
                is_begun = False
                ranked = () if self._placer is None else await self._placer.rank(request, exclude=failed)
                try:
                    async with contextlib.aclosing(self._try(request, ranked)) as batches:
                        async for batch in batches:
                            if not is_begun and self._placer is not None:
                                self._placer.begun(request.request_id)
                            is_begun = True
                            yield batch
                    return
                except (WorkerLostError, WorkerFullError):
                    if is_begun or not tries_left:
                        raise
                    failed.update(ranked[:1])
        finally:
            if self._placer is not None:
                self._placer.gone(request.request_id)

    def abort(self, request_id: RequestId) -> None:
        """End it on its worker; if it may still wait for one, here."""
        self._sessions.abort_everywhere(request_id)
        if (unbegun := self._unbegun.pop(request_id, None)) is not None:
            outputs, num_samples = unbegun
            for index in range(num_samples):
                outputs.put(SequenceOutput(request_id, index, (), finish_reason=FinishReason.ABORT))

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        self._sessions.complete_sample(request_id, index)

    async def scrape(self) -> list[str | None]:
        return await self._sessions.scrape()

    async def _try(self, request: Request, ranked: tuple[str, ...]) -> AsyncGenerator[list[SequenceOutput], None]:
        # Registered before the call, so that no token comes too early.
        outputs = self._sessions.open(request.request_id)
        self._unbegun[request.request_id] = (outputs, request.sampling.n)
        # In a context of its own: calls made within one HTTP request would have one id in Serve, and a router without
        # FIFO order tells pending calls apart by that.
        call = asyncio.create_task(self._call(request, ranked), context=contextvars.Context())
        call.add_done_callback(outputs.end_with)
        try:
            async for batch in outputs.until_ended(request.sampling.n):
                self._unbegun.pop(request.request_id, None)
                yield batch
        except (GeneratorExit, asyncio.CancelledError):
            if not outputs.is_ended:  # the cancellation of the call may not reach the worker
                self._sessions.abort_everywhere(request.request_id)
            raise
        finally:
            call.cancel()
            self._unbegun.pop(request.request_id, None)
            self._sessions.close(request.request_id)

    async def _call(self, request: Request, ranked: tuple[str, ...]) -> None:
        call = self._streaming_handle.run_request.remote(request, self._ingress_id, ranked)
        response = cast(DeploymentResponseGenerator[PagodaError | None], call)
        try:
            refusal = await anext(response)
        except RayTaskError as error:
            # The remote error as it was; its own text is a remote stack trace.
            if isinstance(error.cause, EngineStoppedError):
                raise WorkerLostError(str(error.cause)) from error
            raise error.cause from error
        except BackPressureError as error:
            raise OverloadedError("every worker is full; try again later") from error
        except (RayError, grpc.aio.AioRpcError, StopAsyncIteration) as error:
            raise WorkerLostError("the worker is gone") from error
        finally:
            response.cancel()  # type: ignore[no-untyped-call]
        if isinstance(refusal, EngineStoppedError):
            raise WorkerLostError(str(refusal))
        if isinstance(refusal, OverloadedError):
            raise WorkerFullError(str(refusal))
        if refusal is not None:
            raise refusal
