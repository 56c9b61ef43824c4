"""The workers that this process's router has heard of.

Serve makes its request router from a class that it pickles by value, so ingress and router cannot be given to each
other: they meet here, in the one object of this module. It has a module to itself because modules are pickled by name.
"""

from collections.abc import Callable

from pagoda.cluster.ingress.sessions import WorkerEndpoint
from pagoda.worker.block_hash import HashDomain


class KnownWorkers:
    """The workers that can be routed to."""

    def __init__(self) -> None:
        self._endpoints: frozenset[WorkerEndpoint] = frozenset()
        self._boot_ids: frozenset[str] = frozenset()
        self._lost: set[str] = set()
        self._listener: Callable[[frozenset[WorkerEndpoint]], None] | None = None

    def listen(self, listener: Callable[[frozenset[WorkerEndpoint]], None]) -> None:
        """Call `listener` now and whenever the workers change, on the thread of whoever changes them."""
        self._listener = listener
        listener(self._endpoints)

    @property
    def boot_ids(self) -> frozenset[str]:
        """Of the workers that can be routed to."""
        return self._boot_ids

    def is_usable(self, boot_id: str) -> bool:
        """Whether it can be routed to and is not lost."""
        return boot_id in self._boot_ids and boot_id not in self._lost

    def is_lost(self, boot_id: str) -> bool:
        """Whether the session with it has ended and has not begun again: Serve hears of a death seconds later."""
        return boot_id in self._lost

    def note_session(self, endpoint: WorkerEndpoint, is_open: bool) -> None:
        """A session with it has begun, or has ended."""
        if is_open:
            self._lost.discard(endpoint.boot_id)
        elif endpoint.boot_id in self._boot_ids:
            self._lost.add(endpoint.boot_id)

    @property
    def hash_domain(self) -> HashDomain | None:
        """What the hashes of the workers' blocks begin with; None as long as none has said so."""
        return next((endpoint.hash_domain for endpoint in self._endpoints if endpoint.hash_domain is not None), None)

    def update(self, endpoints: frozenset[WorkerEndpoint]) -> None:
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._boot_ids = frozenset(endpoint.boot_id for endpoint in endpoints)
            self._lost &= self._boot_ids
            if self._listener is not None:
                self._listener(endpoints)


WORKERS = KnownWorkers()
