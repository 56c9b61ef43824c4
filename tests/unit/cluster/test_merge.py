"""Several generations as one stream: whatever ends, ends the others too."""

import asyncio

import pytest
from ascii_service import FakeWorkerClient, out, service

from pagoda.cluster.ingress.generation import Generation, GenerationFailedError, merge
from pagoda.worker.types import FinishReason, SamplingParams

DEADLINE_S = 10.0
LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR


def generations(*clients: FakeWorkerClient) -> list[Generation]:
    return [service(client).generate([1], SamplingParams(max_tokens=None)) for client in clients]


async def read_all(merged: list[Generation]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for _ in merge(merged):
            pass


def assert_no_task_is_left() -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_keeps_positions_and_order() -> None:
    """More batches than the queue holds, from three prompts: each one's come complete and in order."""
    letters = [chr(ord("a") + number % 26) for number in range(90)]
    clients = [
        FakeWorkerClient(*[[out(0, letter)] for letter in letters], [out(0, end, LENGTH)]) for end in ("0", "1", "2")
    ]
    merged = [""] * 3
    async for position, batch in merge(generations(*clients)):
        merged[position] += "".join(output.text for output in batch)
    assert merged == ["".join(letters) + end for end in ("0", "1", "2")]
    assert_no_task_is_left()


@pytest.mark.parametrize("num_others", [0, 1, 3])
async def test_raises_and_closes_all_on_an_error(num_others: int) -> None:
    """One of several prompts fails: the answer as a whole fails, and nobody works on for nothing."""
    failing = FakeWorkerClient([out(0, "a")], [out(0, "", ERROR, error="broken")])
    others = [FakeWorkerClient([out(0, "b")], then_hangs=True) for _ in range(num_others)]
    with pytest.raises(GenerationFailedError, match="broken"):
        await read_all(generations(failing, *others))
    assert all(client.is_closed for client in (failing, *others))
    assert_no_task_is_left()


@pytest.mark.parametrize("num_generations", [1, 3])
@pytest.mark.parametrize("num_batches", [1, 200])
async def test_closed_early_closes_all(num_generations: int, num_batches: int) -> None:
    """The reader goes away while the workers are ahead of it (the queue is full) or behind (all wait)."""
    clients = [FakeWorkerClient(*[[out(0, "a")]] * num_batches, then_hangs=True) for _ in range(num_generations)]
    merged = merge(generations(*clients))
    await anext(merged)
    for _ in range(10):  # lets the forwarding tasks run until they wait
        await asyncio.sleep(0)
    await asyncio.wait_for(merged.aclose(), DEADLINE_S)
    assert all(client.is_closed for client in clients)
    assert_no_task_is_left()


@pytest.mark.parametrize("num_generations", [1, 3])
async def test_cancelled_while_it_waits_closes_all(num_generations: int) -> None:
    clients = [FakeWorkerClient(then_hangs=True) for _ in range(num_generations)]
    waiting = asyncio.create_task(anext(merge(generations(*clients))))  # type: ignore[arg-type]
    for client in clients:
        await client.is_streaming.wait()
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=DEADLINE_S)
    assert all(client.is_closed for client in clients)
    assert_no_task_is_left()


async def test_closed_before_it_began() -> None:
    clients = [FakeWorkerClient(), FakeWorkerClient()]
    await merge(generations(*clients)).aclose()
    assert not any(client.requests for client in clients)
    assert_no_task_is_left()
