"""Ray Serve's request router for the workers. The only place that touches Serve's alpha router API.

It does two things: turns the directory's ranking of a request, which comes with its call, into candidates, and tells
the ingress where each worker's gRPC server listens, which workers publish as replica metadata.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagoda.cluster import known_workers
from pagoda.cluster.ingress.sessions import WorkerEndpoint

RANKED_ARGUMENT = 2
"""Which of the call's arguments is the ranking: boot ids, the best first."""


class PrefixAffinityRouter(RequestRouter):
    """The best worker of the ranking that takes another request. Without one the less loaded of two random workers.

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
            candidate_replicas = _without_lost(candidate_replicas)
            if ranked := _ranked(pending_request, candidate_replicas):
                return ranked
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        return [shuffled[:2], shuffled[2:]]


def _without_lost(candidates: list[RunningReplica]) -> list[RunningReplica]:
    """Those that have not just died, as far as this process knows; all of them if that leaves none."""
    return [each for each in candidates if not known_workers.WORKERS.is_lost(_boot_id(each))] or candidates


def _boot_id(replica: RunningReplica) -> str:
    return str((replica.replica_metadata or {}).get("boot_id", ""))


def _ranked(request: PendingRequest, candidates: list[RunningReplica]) -> list[list[RunningReplica]]:
    """One after the other as the directory says, then those that it does not know. Empty if it says nothing.

    It may name workers that have left: only candidates count.
    """
    ranking = request.args[RANKED_ARGUMENT] if len(request.args) > RANKED_ARGUMENT else ()
    if not isinstance(ranking, tuple):
        return []
    places = {boot_id: place for place, boot_id in enumerate(ranking)}
    known: list[tuple[int, RunningReplica]] = []
    others: list[RunningReplica] = []
    for replica in candidates:
        place = places.get(_boot_id(replica))
        if place is None:
            others.append(replica)
        else:
            known.append((place, replica))
    if not known:
        return []
    known.sort(key=lambda pair: pair[0])
    return [[replica] for _, replica in known] + ([others] if others else [])


ROUTER_OPTIONS: dict[str, Any] = {
    "request_router_class": PrefixAffinityRouter,
    # A freed slot reaches who waits for it in milliseconds.
    "initial_backoff_s": 0.005,
    "max_backoff_s": 0.02,
}
