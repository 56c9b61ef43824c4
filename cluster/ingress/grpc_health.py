"""`grpc.health.v1.Health` over an `InferenceService`, for the server as a whole and for our service by its name."""

import asyncio
from collections.abc import AsyncGenerator

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from pagoda.cluster.ingress.grpc_log import GrpcLog
from pagoda.cluster.ingress.service import InferenceService
from pagoda.proto import inference_pb2
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import quoted

_SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_WATCH_PERIOD_S = 1.0


class GrpcHealth:
    """The methods. They raise `InvalidRequestError` for services that are not here."""

    def __init__(self, service: InferenceService, log: GrpcLog) -> None:
        self._service = service
        self._log = log

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        with self._log.call("Check", request):
            return await self._status(request.service)

    async def watch(self, request: HealthCheckRequest) -> AsyncGenerator[HealthCheckResponse, None]:
        """Says the status at once and whenever it changes. Ends when the service stops."""
        with self._log.call("Watch", request):
            last = None
            while True:
                now = await self._status(request.service)
                if now != last:
                    last = now
                    yield now
                if self._service.is_draining:
                    return
                await asyncio.sleep(_WATCH_PERIOD_S)

    async def _status(self, service: str) -> HealthCheckResponse:
        if service not in ("", _SERVICE_NAME):
            raise InvalidRequestError("service", f"{quoted(service)} is not served here; served: {_SERVICE_NAME!r}")
        is_healthy = await self._service.is_healthy()
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if is_healthy else HealthCheckResponse.NOT_SERVING
        )
