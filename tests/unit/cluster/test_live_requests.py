"""What runs is waited for, then aborted; what comes late is refused."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from pagoda.cluster.ingress.live_requests import DrainingError, LiveRequests
from pagoda.worker.types import RequestId

A, B = RequestId("a"), RequestId("b")
FOREVER_S = 1000.0


class Aborts:
    """Remembers what was aborted; `then` is called with it."""

    def __init__(self, then: Callable[[RequestId], None] = lambda _: None) -> None:
        self.requests: list[RequestId] = []
        self.then = then

    def __call__(self, request_id: RequestId) -> None:
        self.requests.append(request_id)
        self.then(request_id)


async def begin_drain(live: LiveRequests, timeout_s: float = FOREVER_S) -> "asyncio.Task[None]":
    task = asyncio.create_task(live.drain(timeout_s))
    await asyncio.sleep(0)
    return task


async def test_drain_with_nothing_running_is_over_at_once() -> None:
    live = LiveRequests(Aborts())
    with live.running(A):
        pass
    await live.drain(FOREVER_S)


async def test_new_requests_are_refused_while_others_end() -> None:
    live = LiveRequests(Aborts())
    live.refuse_if_draining()
    with live.running(A):
        draining = await begin_drain(live)
        assert live.is_draining
        with pytest.raises(DrainingError):
            live.refuse_if_draining()
        with pytest.raises(DrainingError), live.running(B):
            pass
        assert not draining.done()
    await draining
    with pytest.raises(DrainingError):
        live.refuse_if_draining()


async def test_drain_waits_for_the_last_one() -> None:
    """Also one that fails."""
    aborts = Aborts()
    live = LiveRequests(aborts)
    with suppress(ValueError), live.running(A):
        with live.running(B):
            draining = await begin_drain(live)
        await asyncio.sleep(0)
        assert not draining.done()
        raise ValueError
    await draining
    assert not aborts.requests


async def test_what_is_late_is_aborted_and_waited_for() -> None:
    stacks = {request_id: ExitStack() for request_id in (A, B)}
    aborts = Aborts(lambda request_id: asyncio.get_running_loop().call_soon(stacks[request_id].close))  # type: ignore[arg-type, return-value]
    live = LiveRequests(aborts)
    for request_id, stack in stacks.items():
        stack.enter_context(live.running(request_id))
    await live.drain(0)
    assert sorted(aborts.requests) == [A, B]


async def test_abort_that_no_worker_knew_yet_is_repeated() -> None:
    """A request is aborted while it is still on its way to its worker."""
    stack = ExitStack()
    aborts = Aborts(lambda _: stack.close() if len(aborts.requests) == 3 else None)
    live = LiveRequests(aborts)
    stack.enter_context(live.running(A))
    await live.drain(0)
    assert aborts.requests == [A] * 3


async def test_client_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer stands still in the middle, so that it never hears that it was aborted."""
    monkeypatch.setattr("pagoda.cluster.ingress.live_requests._ABORT_PERIOD_S", 0.5)
    aborts = Aborts()
    live = LiveRequests(aborts)
    with live.running(A):
        await live.drain(0)
    assert aborts.requests == [A] * 2


async def test_two_drains_at_once() -> None:
    """One is in a hurry, as when somebody else takes the service down too."""
    stack = ExitStack()
    live = LiveRequests(Aborts(lambda _: stack.close()))
    stack.enter_context(live.running(A))
    patient = await begin_drain(live)
    await live.drain(0)
    await patient
