"""Until when an ingress works on a request: from when it has read it, tokenising and waiting for a worker included.

The worker is told what is left and ends the request itself. Should none answer, the ingress does, a moment later.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from pagoda.worker.errors import DeadlineExceededError, InvalidRequestError

T = TypeVar("T")
GRACE_S = 0.25
"""What the worker gets to say so itself: its time began a little later."""


class Deadline:
    """One request's. Made and used on one event loop."""

    def __init__(self, timeout_s: float | None) -> None:
        """It is in `timeout_s` seconds from now, or never."""
        self._at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds; None if it never comes. Negative once it is over."""
        return None if self._at_s is None else self._at_s - asyncio.get_running_loop().time()

    async def bound(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled at the deadline. Raises `DeadlineExceededError` then."""
        try:
            async with asyncio.timeout_at(self._at_s):
                return await work
        except TimeoutError:
            raise _exceeded() from None

    async def limit(self, outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The same outputs; soon after the deadline they are closed, and `DeadlineExceededError` is raised."""
        alarm = _Alarm()
        timer = None
        if self._at_s is not None:
            timer = asyncio.get_running_loop().call_at(self._at_s + GRACE_S, alarm.ring)
        try:
            async with aclosing(outputs):
                while not alarm.has_rung:
                    try:
                        output = await alarm.unless_it_rings(outputs)
                    except StopAsyncIteration:
                        return
                    yield output
                raise _exceeded()
        finally:
            if timer is not None:
                timer.cancel()


class _Alarm:
    """Cancels who waits when it rings. `asyncio.timeout` would have to be set for each output anew."""

    def __init__(self) -> None:
        self.has_rung = False
        self._waiting: asyncio.Task[object] | None = None

    def ring(self) -> None:
        self.has_rung = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def unless_it_rings(self, outputs: AsyncGenerator[T, None]) -> T:
        task = self._waiting = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        try:
            return await anext(outputs)
        except asyncio.CancelledError:
            if self.has_rung and task.uncancel() <= num_cancels:
                raise _exceeded() from None
            raise
        finally:
            self._waiting = None


def checked_timeout_s(timeout_s: float | None, most_s: float | None) -> float | None:
    """What a request asked for, or else the most it may take. Raises `InvalidRequestError`."""
    if timeout_s is None:
        return most_s
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= (most_s or timeout_s)):
        allowed = "above 0" if most_s is None else f"in (0, {most_s:g}]"
        raise InvalidRequestError("timeout_s", f"must be {allowed} seconds, got {timeout_s:g}")
    return timeout_s


def _exceeded() -> DeadlineExceededError:
    return DeadlineExceededError("the time that the request may take is over")
