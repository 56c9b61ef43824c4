"""However things go wrong, each sequence ends exactly once."""

import threading
from collections.abc import Callable

import pytest
from engine_client import HANG_S, Client, greedy
from fakes import Failure

from pagoda.worker import engine as engine_module
from pagoda.worker.engine import MAX_FAILED_STEPS
from pagoda.worker.errors import EngineStoppedError, IntegrityError, RankLostError
from pagoda.worker.types import (
    FinishReason,
    SchedulerOutput,
)


@pytest.mark.parametrize("failure", ["before it began", "half-way"])
def test_failed_step_ends_its_sequences_only(make_client: Callable[..., Client], failure: Failure) -> None:
    """The one that waits for a slot gets its tokens, though its prompt is the one that failed."""
    client = make_client(max_num_seqs=1)
    client.executor.failures += [None, failure]
    client.add("a")
    client.add("b")
    client.engine.start()
    assert client.reason("a") is FinishReason.ERROR
    assert failure in client.end("a").error
    assert client.tokens("a") == greedy(6, 1)
    assert client.reason("b") is FinishReason.LENGTH
    assert client.tokens("b") == greedy(6)
    assert client.engine.failure is None


def test_three_failed_steps_in_a_row_end_everything(make_client: Callable[..., Client]) -> None:
    """Three requests fail with their steps; two that never ran end with the engine, which takes no more."""
    client = make_client(max_num_seqs=1)
    client.executor.failures += [RuntimeError("out of memory")] * MAX_FAILED_STEPS
    for index in range(5):
        client.add(str(index))
    client.engine.start()
    errors = [client.end(str(index)).error for index in range(5)]
    assert all("out of memory" in error for error in errors[:3])
    assert all("the engine died" in error for error in errors[3:])
    assert {output.finish_reason for output in client.outputs} == {FinishReason.ERROR}
    client.engine._thread.join(HANG_S)
    assert isinstance(client.engine.failure, EngineStoppedError)
    with pytest.raises(EngineStoppedError):
        client.add("late")
    assert client.engine.drain(HANG_S)


def test_failed_steps_apart_do_not_add_up(make_client: Callable[..., Client]) -> None:
    client = make_client(max_num_seqs=1)
    client.executor.failures += ["half-way", "half-way", None, "half-way", "half-way", None]
    for index in range(5):
        client.add(str(index), max_tokens=2)
    client.engine.start()
    assert [client.reason(str(index)) for index in range(5)] == [FinishReason.ERROR] * 4 + [FinishReason.LENGTH]
    assert client.engine.failure is None


def test_integrity_error_ends_everything_at_once(make_client: Callable[..., Client]) -> None:
    """Not only the sequences of its step: nothing is certain any more."""
    client = make_client(max_num_seqs=1)
    client.executor.failures += [None, IntegrityError("the ranks disagree")]
    for name in "abc":
        client.add(name)
    client.engine.start()
    for name in "abc":
        assert client.reason(name) is FinishReason.ERROR
        assert "the ranks disagree" in client.end(name).error
    client.engine._thread.join(HANG_S)
    assert isinstance(client.engine.failure, IntegrityError)
    with pytest.raises(EngineStoppedError):
        client.add("late")


def test_lost_rank_ends_everything_at_once(make_client: Callable[..., Client]) -> None:
    """A failed step of several ranks leaves them at different points: there is no second try."""
    client = make_client(max_num_seqs=1)
    client.executor.failures += [None, RankLostError("rank 1 is gone")]
    for name in "abc":
        client.add(name)
    client.engine.start()
    for name in "abc":
        assert client.reason(name) is FinishReason.ERROR
        assert "rank 1 is gone" in client.end(name).error
    client.engine._thread.join(HANG_S)
    assert isinstance(client.engine.failure, RankLostError)
    assert client.executor.num_shutdowns == 1


def test_idle_engine_is_abandoned(client: Client) -> None:
    """Nothing runs that could fail, so somebody else notices."""
    client.engine.start()
    client.add("a")
    client.reason("a")
    client.engine.abandon(RankLostError("rank 1 is gone"))
    client.engine._thread.join(HANG_S)
    assert str(client.engine.failure) == "rank 1 is gone"
    assert client.executor.num_shutdowns == 1
    with pytest.raises(EngineStoppedError):
        client.add("late")


def test_engine_abandoned_in_a_step_ends_after_it(client: Client) -> None:
    client.executor.gate.clear()
    client.add("a", max_tokens=5)
    client.engine.start()
    assert client.executor.at_gate.wait(HANG_S)
    client.engine.abandon(RankLostError("rank 1 is gone"))
    with pytest.raises(EngineStoppedError):
        client.add("late")
    client.executor.gate.set()
    assert client.reason("a") is FinishReason.ERROR
    assert client.tokens("a") == greedy(6, 1)


def test_scheduler_bug_ends_everything(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception in our own bookkeeping is no failed step."""

    def schedule() -> SchedulerOutput:
        raise KeyError("a/0")

    monkeypatch.setattr(client.scheduler, "schedule", schedule)
    client.add("a", n=2)
    client.engine.start()
    assert [client.reason("a", index) for index in range(2)] == [FinishReason.ERROR] * 2
    client.engine._thread.join(HANG_S)
    assert isinstance(client.engine.failure, KeyError)


def test_receiver_that_fails_for_ever_stops_the_engine(client: Client) -> None:
    """Its event loop was closed, say. The thread must still end and give up the device."""

    def fail() -> None:
        raise RuntimeError("Event loop is closed")

    client.then = fail
    client.add("a")
    client.engine.start()
    client.engine._thread.join(HANG_S)
    assert str(client.engine.failure) == "Event loop is closed"
    assert client.executor.num_shutdowns == 1
    with pytest.raises(EngineStoppedError):
        client.add("late")


def test_idle_engine_checks_its_books(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds a block while there is nothing to do; and it goes on after that."""
    monkeypatch.setattr(engine_module, "IDLE_CHECK_S", 0.0)
    checked = threading.Event()
    check_integrity = client.scheduler.check_integrity

    def check() -> None:
        check_integrity()
        checked.set()

    monkeypatch.setattr(client.scheduler, "check_integrity", check)
    client.add("a")
    client.engine.start()
    client.reason("a")
    assert checked.wait(HANG_S)
    client.add("b")
    assert client.reason("b") is FinishReason.LENGTH


def test_leak_stops_the_idle_engine(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_CHECK_S", 0.0)
    client.scheduler.manager.pool.allocate()
    client.engine.start()
    client.engine._thread.join(HANG_S)
    assert isinstance(client.engine.failure, IntegrityError)
    with pytest.raises(EngineStoppedError):
        client.add("late")
