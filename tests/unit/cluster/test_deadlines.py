"""The ingress's own end of a request whose time is over, should no worker say so."""

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest
from ascii_service import LIMITS, AsciiTokenizer, FakeWorkerClient, out, service

from pagoda.cluster.ingress import deadlines
from pagoda.cluster.ingress.deadlines import Deadline, checked_timeout_s
from pagoda.cluster.ingress.service import InferenceService
from pagoda.worker.errors import DeadlineExceededError, InvalidRequestError
from pagoda.worker.types import FinishReason, SamplingParams

SOON_S = 0.02


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE_S", 0.0)


async def numbers(*, closed: asyncio.Event, num: int = 2, hangs: bool = True) -> AsyncGenerator[int, None]:
    try:
        for number in range(num):
            yield number
        if hangs:
            await asyncio.Event().wait()
    finally:
        closed.set()


async def test_outputs_that_stop_coming_end_at_the_deadline() -> None:
    closed = asyncio.Event()
    outputs = Deadline(SOON_S).limit(numbers(closed=closed))
    assert [await anext(outputs), await anext(outputs)] == [0, 1]
    with pytest.raises(DeadlineExceededError):
        await anext(outputs)
    assert closed.is_set()


async def test_a_reader_that_takes_its_time_hears_of_it_next() -> None:
    """It rings while nobody waits: nothing is cancelled, and the next look raises."""
    closed = asyncio.Event()
    outputs = Deadline(SOON_S).limit(numbers(closed=closed))
    assert await anext(outputs) == 0
    await asyncio.sleep(2 * SOON_S)
    with pytest.raises(DeadlineExceededError):
        await anext(outputs)
    assert closed.is_set()


async def test_outputs_that_end_in_time_leave_nothing_behind() -> None:
    """The task goes on after the deadline, unharmed."""
    closed = asyncio.Event()
    assert [n async for n in Deadline(SOON_S).limit(numbers(closed=closed, hangs=False))] == [0, 1]
    await asyncio.sleep(2 * SOON_S)
    assert closed.is_set()


async def test_a_cancellation_of_the_reader_s_own_stays_one() -> None:
    closed = asyncio.Event()

    async def read() -> None:
        async for _ in Deadline(60.0).limit(numbers(closed=closed)):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()


async def test_without_a_deadline_nothing_ends() -> None:
    deadline = Deadline(None)
    assert deadline.left_s is None
    assert await deadline.bound(asyncio.sleep(0, "result")) == "result"
    assert [n async for n in deadline.limit(numbers(closed=asyncio.Event(), hangs=False))] == [0, 1]


async def test_work_is_cancelled_at_the_deadline() -> None:
    with pytest.raises(DeadlineExceededError):
        await Deadline(SOON_S).bound(asyncio.Event().wait())


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 10.5, float("nan"), float("inf"), 1e300])
def test_timeouts_out_of_range_are_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"^timeout_s: must be in \(0, 10\]"):
        checked_timeout_s(timeout_s, 10.0)


def test_who_asks_for_nothing_gets_the_most() -> None:
    assert checked_timeout_s(None, 10.0) == 10.0
    assert checked_timeout_s(3.0, 10.0) == 3.0
    assert checked_timeout_s(None, None) is None


# -- in the service ------------------------------------------------------------------------------


async def test_worker_that_does_not_answer() -> None:
    client = FakeWorkerClient([out(0, "a")], then_hangs=True)
    tested = service(client)
    outputs = tested.generate([1], SamplingParams(), deadline=tested.deadline(SOON_S)).outputs
    assert [o.text for o in await anext(outputs)] == ["a"]
    with pytest.raises(DeadlineExceededError):
        await anext(outputs)
    assert client.is_closed


async def test_worker_is_told_what_is_left() -> None:
    """Tokenising took its part."""
    client = FakeWorkerClient([out(0, "a", FinishReason.LENGTH)])
    tested = InferenceService(AsciiTokenizer(), client, LIMITS, max_timeout_s=60.0)  # type: ignore[arg-type]
    deadline = tested.deadline(None)
    await asyncio.sleep(0.01)
    async for _ in tested.generate([1], SamplingParams(), deadline=deadline).outputs:
        pass
    timeout_s = client.requests[0].timeout_s
    assert timeout_s is not None
    assert 0 < timeout_s <= 59.99


async def test_worker_s_own_end_is_the_same_error() -> None:
    client = FakeWorkerClient([out(0, "a")], [out(0, "", FinishReason.DEADLINE)])
    with pytest.raises(DeadlineExceededError):
        async for _ in service(client).generate([1], SamplingParams()).outputs:
            pass


async def test_prompt_that_waits_for_the_tokenizer() -> None:
    """Another prompt takes the tokenizer's thread; this one's time is over meanwhile, and it is not tokenised."""
    tokenizer, gate = AsciiTokenizer(), threading.Event()
    tested = InferenceService(tokenizer, FakeWorkerClient(), LIMITS)  # type: ignore[arg-type]
    blocked = asyncio.get_running_loop().run_in_executor(tested._tokenizing, gate.wait)
    with pytest.raises(DeadlineExceededError):
        await tested.deadline(SOON_S).bound(tested.encode("abc"))
    gate.set()
    await blocked
    await tested.encode("d")
    assert len(tokenizer.max_tokens) == 1
    tested.close()
