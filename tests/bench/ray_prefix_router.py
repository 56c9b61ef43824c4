"""Ray's own prefix router before our workers, to be compared with: it keeps a tree of the texts that it has routed."""

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from pagoda.cluster import known_workers
from pagoda.cluster.ingress.sessions import WorkerEndpoint


class RayPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Sees a character for each token."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        endpoints = (WorkerEndpoint.from_metadata(replica.replica_metadata) for replica in replicas)
        known_workers.WORKERS.update(frozenset(filter(None, endpoints)))

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        request: Any = pending_request.args[0]
        return "".join(chr(0x10000 + token_id) for token_id in request.prompt_token_ids)
