"""The directory as a Ray actor: detached, so that it outlives whoever started it, and restarted when it dies."""

import asyncio
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle

from pagoda.cluster.directory.server import DirectoryServer
from pagoda.cluster.logs import LogLevel, log_through_serve
from pagoda.worker.cluster_tls import ClusterTls

_NAMESPACE = "pagoda-directories"


class DirectoryActor:
    """One directory. Starts to listen when it is first asked where."""

    def __init__(self, token: str, log_level: LogLevel, tls: ClusterTls | None = None) -> None:
        log_through_serve(log_level)
        self._token = token
        self._tls = tls
        self._server: DirectoryServer | None = None
        self._address: str | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> str:
        """host:port."""
        async with self._starting:
            if self._address is None:
                host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
                self._server = DirectoryServer(token=self._token, tls=self._tls)
                self._address = f"{host}:{await self._server.start(f'{host}:0')}"
        return self._address


class ActorAddress:
    """Where a directory actor listens now: another place after each start."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: ActorHandle[Any] | None = None

    async def __call__(self) -> str:
        if self._actor is None:
            self._actor = await asyncio.to_thread(ray.get_actor, self.name, namespace=_NAMESPACE)
        return str(await self._actor.address.remote())

    def __reduce__(self) -> tuple[type["ActorAddress"], tuple[str]]:
        return ActorAddress, (self.name,)


def name_directories(count: int) -> list[ActorAddress]:
    """Where `count` directories will be, once they are started."""
    return [ActorAddress(f"directory-{uuid.uuid4().hex[:8]}-{number}") for number in range(count)]


def start_directories(
    directories: Sequence[ActorAddress], token: str, log_level: LogLevel, tls: ClusterTls | None
) -> None:
    """Start them, and end those of a service that was here before."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(DirectoryActor)
    for each in directories:
        actor.options(name=each.name, namespace=_NAMESPACE, lifetime="detached").remote(token, log_level, tls)
    stop_directories(keep={each.name for each in directories})


def stop_directories(keep: Collection[str] = ()) -> None:
    """End all other directories of this Ray cluster."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == _NAMESPACE and named["name"] not in keep:
            with suppress(ValueError):  # it is gone
                ray.kill(ray.get_actor(**named))
