"""Has Ray Serve carry requests to the workers; their tokens come over the gRPC sessions."""

import asyncio
from typing import Any, cast

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from pagoda.cluster.ingress.resuming_client import WorkerFullError, WorkerStoppingError
from pagoda.cluster.ingress.sessions import WorkerLostError
from pagoda.worker.errors import EngineStoppedError, OverloadedError, PagodaError
from pagoda.worker.types import Request

PING_DEADLINE_S = 10.0


class ServeWorkerCalls:
    """Implements `WorkerCalls`.

    Each request is one Serve call that lasts as long as the request: so Serve counts it, drains it, and ends it
    when either side dies.
    """

    def __init__(self, handle: DeploymentHandle[Any], ingress_id: str) -> None:
        self._handle = handle
        # By gRPC and not as a call of a Ray actor, which takes twice the CPU time. As a stream, of which nothing comes
        # but its end, since the router hears whether a unary call by gRPC was accepted only when that has ended.
        self._streaming_handle = handle.options(stream=True, _by_reference=False)
        self._ingress_id = ingress_id

    async def ping(self) -> None:
        await asyncio.wait_for(self._handle.ping.remote(), PING_DEADLINE_S)

    async def run(self, request: Request, ranked: tuple[str, ...]) -> None:
        call = self._streaming_handle.run_request.remote(request, self._ingress_id, ranked)
        response = cast(DeploymentResponseGenerator[PagodaError | None], call)
        try:
            refusal = await anext(response)
        except RayTaskError as error:
            # The remote error as it was; its own text is a remote stack trace.
            if isinstance(error.cause, EngineStoppedError):
                raise WorkerStoppingError(str(error.cause)) from error
            raise error.cause from error
        except BackPressureError as error:
            raise WorkerFullError("every worker is full; try again later") from error
        except (RayError, grpc.aio.AioRpcError, StopAsyncIteration) as error:
            raise WorkerLostError("the worker is gone") from error
        except RayServeException as error:
            raise EngineStoppedError(f"no worker can be reached: {error}") from error
        finally:
            response.cancel()  # type: ignore[no-untyped-call]
        if isinstance(refusal, EngineStoppedError):
            raise WorkerStoppingError(str(refusal))
        if isinstance(refusal, OverloadedError):
            raise WorkerFullError(str(refusal), retry_after_s=refusal.retry_after_s)
        if refusal is not None:
            raise refusal
