"""The endpoints that tell of the server itself: for probes, Prometheus and the curious."""

from starlette.responses import Response

from pagoda import __version__
from pagoda.cluster.ingress.metrics import IngressMetrics
from pagoda.cluster.ingress.service import InferenceService
from pagoda.worker.instruments import CONTENT_TYPE


class ServerApi:
    """The endpoints."""

    def __init__(self, service: InferenceService, metrics: IngressMetrics) -> None:
        self._service = service
        self._metrics = metrics

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def health(self) -> Response:
        return Response(status_code=200 if await self._service.is_healthy() else 503)

    async def metrics(self) -> Response:
        """Of this process and of all workers, in Prometheus' text format."""
        workers = await self._service.scrape_workers()
        return Response(self._metrics.exposition(workers), media_type=CONTENT_TYPE)
