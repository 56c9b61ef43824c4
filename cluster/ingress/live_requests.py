"""The generations that run in this ingress process, and whether it takes more. One event loop.

accepting -- drain --> draining, for good: new ones are refused, running ones go on
                       until none is left, or until their time is over and they are aborted
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pagoda.worker.errors import EngineStoppedError
from pagoda.worker.types import RequestId

ABORT_GRACE_S = 1.0
"""How long clients have to read that their requests were aborted. One that reads a byte a second is not waited for."""
_ABORT_PERIOD_S = 0.1


class DrainingError(EngineStoppedError):
    """The service is stopping."""


class LiveRequests:
    """Knows what runs, and ends it when the service stops."""

    def __init__(self, abort: Callable[[RequestId], None]) -> None:
        """`abort` ends a request on whatever worker it runs; unknown and ended ones are ignored."""
        self._abort = abort
        self._live: set[RequestId] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def refuse_if_draining(self) -> None:
        """Raise `DrainingError` if no new request is taken."""
        if self.is_draining:
            raise DrainingError("the service is stopping and takes no new requests")

    @contextmanager
    def running(self, request_id: RequestId) -> Iterator[None]:
        """The request runs for as long as the block does. Raises `DrainingError` if it came too late."""
        self.refuse_if_draining()
        self._live.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._live.remove(request_id)
            if not self._live:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no more; return once nothing runs, or once what still runs after `timeout_s` was aborted."""
        self.is_draining = True
        if await self._is_idle_within(timeout_s):
            return
        for _ in range(round(ABORT_GRACE_S / _ABORT_PERIOD_S)):
            for request_id in tuple(self._live):
                self._abort(request_id)
            # Again and again: a request that was on its way to a worker was unknown there the first time.
            if await self._is_idle_within(_ABORT_PERIOD_S):
                return

    async def _is_idle_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()
