"""An abort ends what it names, once, whenever it comes."""

from collections.abc import Callable

from engine_client import HANG_S, Client, greedy

from pagoda.worker.types import (
    FinishReason,
    RequestId,
)


def test_abort_before_the_start(client: Client) -> None:
    client.add("a")
    client.engine.abort(RequestId("a"))
    client.engine.start()
    assert client.reason("a") is FinishReason.ABORT
    assert client.tokens("a") == []


def test_abort_in_the_middle_of_a_step(client: Client) -> None:
    """The step's token may still come; then comes the end, and the blocks are free."""
    client.executor.gate.clear()
    client.add("a", max_tokens=100)
    client.engine.start()
    assert client.executor.at_gate.wait(HANG_S)
    client.engine.abort(RequestId("a"))
    client.executor.gate.set()
    assert client.reason("a") is FinishReason.ABORT
    assert client.tokens("a") == greedy(6, 1)
    client.add("b", 9)
    assert client.reason("b") is FinishReason.LENGTH


def test_abort_while_waiting(make_client: Callable[..., Client]) -> None:
    client = make_client(max_num_seqs=1)
    client.executor.gate.clear()
    client.add("a")
    client.add("b")
    client.engine.start()
    assert client.executor.at_gate.wait(HANG_S)
    client.engine.abort(RequestId("b"))
    client.executor.gate.set()
    assert client.reason("b") is FinishReason.ABORT
    assert client.reason("a") is FinishReason.LENGTH


def test_abort_ends_every_sample(make_client: Callable[..., Client]) -> None:
    """Of four samples two run and two wait."""
    client = make_client(max_num_seqs=2)
    client.add("a", n=4, max_tokens=200)
    client.engine.start()
    client.wait_for_tokens("a", 3)
    client.engine.abort(RequestId("a"))
    assert [client.reason("a", index) for index in range(4)] == [FinishReason.ABORT] * 4


def test_late_double_and_unknown_aborts_are_ignored(client: Client) -> None:
    """An abort of the ended request must not end the next one of the same id either."""
    client.engine.start()
    client.engine.abort(RequestId("never seen"))
    client.add("a", max_tokens=200)
    client.engine.abort(RequestId("a"))
    client.engine.abort(RequestId("a"))
    assert client.reason("a") is FinishReason.ABORT
    assert client.engine.drain(HANG_S)
    client.engine.abort(RequestId("a"))
    client.engine.shutdown()
    client.engine.abort(RequestId("a"))
    assert client.engine.failure is None


def test_sample_that_its_reader_found_whole(client: Client) -> None:
    """A stop string: the sample ends as stopped, the other one goes on."""
    client.add("a", n=2, max_tokens=200)
    client.engine.start()
    client.wait_for_tokens("a", 3)
    client.engine.abort(RequestId("a"), 0, FinishReason.STOP)
    assert client.reason("a", 0) is FinishReason.STOP
    assert client.reason("a", 1) is FinishReason.LENGTH
