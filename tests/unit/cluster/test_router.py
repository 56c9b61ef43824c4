"""The router: a ranking becomes candidates; and what of Ray's alpha API we rely on is still there."""

import inspect
from dataclasses import dataclass, fields
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pagoda.cluster.replica import Worker
from pagoda.cluster.router import RANKED_ARGUMENT, ROUTER_OPTIONS, PrefixAffinityRouter


@dataclass(eq=False)
class Replica:
    """As much of one as a router looks at."""

    name: str

    @property
    def replica_metadata(self) -> dict[str, str]:
        return {"boot_id": self.name, "address": "127.0.0.1:1"} if self.name else {}


@dataclass
class Context:
    should_backoff: bool = False


class Request:
    """As much of one as a router looks at."""

    def __init__(self, *args: Any) -> None:
        self.args = list(args)
        self.routing_context = Context()


async def choose(request: Any, *names: str) -> list[list[str]]:
    router: Any = object.__new__(PrefixAffinityRouter)
    ranks = await router.choose_replicas([Replica(name) for name in names], request)
    return [[replica.name for replica in rank] for rank in ranks]


async def test_ranking() -> None:
    """One after the other; those that the directory does not know last; those that have left not at all."""
    request = Request("request", "ingress", ("c", "gone", "a"))
    assert await choose(request, "a", "b", "c", "") == [["c"], ["a"], ["b", ""]]
    assert request.routing_context.should_backoff


@pytest.mark.parametrize("args", [(), ("request", "ingress"), ("r", "i", ()), ("r", "i", ("gone",)), ("r", "i", None)])
async def test_without_a_ranking_by_load(args: tuple[Any, ...]) -> None:
    """Two at random, of which Serve takes the less loaded one, then the others."""
    first, rest = await choose(Request(*args), "a", "b", "c")
    assert (len(first), sorted(first + rest)) == (2, ["a", "b", "c"])


async def test_without_a_request() -> None:
    """Serve asks so too."""
    first, rest = await choose(None, "a", "b", "c")
    assert sorted(first + rest) == ["a", "b", "c"]


def test_the_ranking_is_where_the_router_looks_for_it() -> None:
    assert list(inspect.signature(Worker.run_request).parameters)[1 + RANKED_ARGUMENT] == "ranked"


def test_what_we_rely_on_of_ray_is_there() -> None:
    """Alpha API: whoever upgrades Ray hears of it here."""
    assert {"args", "routing_context"} <= {field.name for field in fields(PendingRequest)}
    assert list(inspect.signature(RequestRouter.choose_replicas).parameters) == [
        "self", "candidate_replicas", "pending_request",
    ]  # fmt: skip
    assert list(inspect.signature(RequestRouter.update_replicas).parameters) == ["self", "replicas"]
    assert isinstance(inspect.getattr_static(RunningReplica, "replica_metadata"), property)
    assert set(ROUTER_OPTIONS) <= set(RequestRouterConfig.model_fields)
    assert not any("FIFO" in base.__name__ for base in PrefixAffinityRouter.__mro__)
