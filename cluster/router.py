"""Ray Serve's request router for the workers. The only place that touches Serve's alpha router API.

It does two things: picks the candidates of a request, and tells the ingress where each worker's gRPC server listens,
which workers publish as replica metadata.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagoda.cluster import known_workers
from pagoda.cluster.ingress.sessions import WorkerEndpoint


class WorkerRouter(RequestRouter):
    """The less loaded of two random workers; if both are full, any other.

    Never raises: an exception here would leave the request waiting for ever.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        endpoints = (WorkerEndpoint.from_metadata(replica.replica_metadata) for replica in replicas)
        known_workers.WORKERS.update(frozenset(filter(None, endpoints)))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Without this a full deployment would be asked again at once, for ever.
            pending_request.routing_context.should_backoff = True
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        return [shuffled[:2], shuffled[2:]]


ROUTER_OPTIONS: dict[str, Any] = {
    "request_router_class": WorkerRouter,
    # A freed slot reaches who waits for it in milliseconds.
    "initial_backoff_s": 0.005,
    "max_backoff_s": 0.02,
}
