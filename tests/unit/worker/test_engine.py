"""The engine's thread: requests in, tokens out; what is refused, and how it stops."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_client import HANG_S, Client, expected, greedy

from pagoda.worker.errors import EngineStoppedError, InvalidRequestError, OverloadedError
from pagoda.worker.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
)

# -- tokens ------------------------------------------------------------------------------------


def test_requests_get_their_tokens(client: Client) -> None:
    """Added before the start and while it runs, in one batch or alone: the same."""
    for num_tokens in range(1, 7):
        client.add(str(num_tokens), num_tokens)
    client.engine.start()
    for num_tokens in range(7, 13):
        client.add(str(num_tokens), num_tokens, max_tokens=num_tokens)
    for num_tokens in range(1, 13):
        assert client.reason(str(num_tokens)) is FinishReason.LENGTH
        assert client.tokens(str(num_tokens)) == greedy(num_tokens, max_tokens=num_tokens if num_tokens > 6 else 16)


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_preemption_changes_no_token(make_client: Callable[..., Client], num_blocks: int) -> None:
    """Six requests in ample memory, and in memory that holds little more than one of them at its end."""
    client = make_client(num_blocks=num_blocks)
    sampling = {index: SamplingParams(seed=index, max_tokens=22) for index in range(6)}
    for index in range(6):
        client.add(str(index), 5 + index // 2, priority=index % 2, temperature=1.0, seed=index, max_tokens=22)
    client.engine.start()
    for index in range(6):
        assert client.reason(str(index)) is FinishReason.LENGTH
        assert client.tokens(str(index)) == expected(5 + index // 2, sampling[index])
    assert (client.engine.stats().num_preemptions > 0) == (num_blocks == 8)


def test_same_seed_same_tokens(client: Client) -> None:
    """And the samples of one request differ, as requests that name no seed do."""
    client.engine.start()
    for name in "ab":
        client.add(name, temperature=1.0, seed=5, n=2)
    for name in "cd":
        client.add(name, temperature=1.0)
    for name in "abcd":
        client.reason(name)
    client.reason("a", 1)
    client.reason("b", 1)
    assert client.tokens("a") == client.tokens("b")
    assert client.tokens("a", 1) == client.tokens("b", 1)
    assert len({tuple(tokens) for tokens in (client.tokens("a"), client.tokens("a", 1))}) == 2
    assert client.tokens("c") != client.tokens("d")


def test_only_equal_salts_share_blocks(client: Client) -> None:
    """The rank fails a step that reads another salt's blocks."""
    client.engine.start()
    cached = []
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one"), ("d", b"")):
        client.add(name, 9, salt=salt)
        cached.append(client.end(name).num_cached_tokens)
    assert cached == [0, 0, 8, 0]


def test_outputs_come_on_the_engines_thread(client: Client) -> None:
    names = set()
    client.then = lambda: names.add(threading.current_thread().name)
    client.add("a")
    client.engine.start()
    client.reason("a")
    client.engine.shutdown()
    assert names == {"pagoda-engine"}


# -- refusals ----------------------------------------------------------------------------------


def test_request_that_can_never_be_served_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match=r"^max_tokens: "):
        client.add("a", max_tokens=1000)
    client.engine.start()
    assert client.engine.drain(HANG_S)


def test_id_in_use_is_refused(client: Client) -> None:
    """Once the first request has ended, its id is free."""
    client.add("a", seed=1, max_tokens=3)
    with pytest.raises(InvalidRequestError, match=r"^request_id: a is in use"):
        client.add("a")
    client.engine.start()
    client.reason("a")
    client.add("b")
    client.reason("b")
    client.add("a", 8, seed=1, max_tokens=2)
    client.engine.drain(HANG_S)
    assert client.tokens("a") == greedy(6, 3) + greedy(8, 2)


def test_what_the_queue_does_not_hold_is_shed(make_client: Callable[..., Client]) -> None:
    """Samples count, not requests: one may run and three may wait here. What ended makes room again."""
    client = make_client(max_num_seqs=1, max_num_waiting=3)
    client.add("a", n=3)
    client.add("c")
    client.add("b", n=2)
    client.engine.start()
    assert [client.reason("b", index) for index in range(2)] == [FinishReason.SHED] * 2
    for index in range(3):
        assert client.reason("a", index) is FinishReason.LENGTH
    assert client.reason("c") is FinishReason.LENGTH
    client.add("e")
    assert client.reason("e") is FinishReason.LENGTH


def test_more_than_the_engine_can_look_at_is_refused(make_client: Callable[..., Client]) -> None:
    """While a step takes its time, as many again may come as may wait; the rest is refused on the spot."""
    client = make_client(max_num_seqs=1, max_num_waiting=3)
    for name in "abcdefg":
        client.add(name)
    with pytest.raises(OverloadedError):
        client.add("h")
    client.engine.start()
    assert [name for name in "abcdefg" if client.reason(name) is FinishReason.SHED] == ["e", "f", "g"]


# -- deadlines ---------------------------------------------------------------------------------


def test_time_is_over_in_every_state(make_client: Callable[..., Client]) -> None:
    """One runs, one waits, one has not even been looked at: each ends once, with what it has got."""
    now_s = 100.0
    client = make_client(max_num_seqs=1, clock=lambda: now_s)
    client.executor.gate.clear()
    client.add("running", timeout_s=5.0, max_tokens=200)
    client.add("waiting", timeout_s=5.0, n=2)
    client.engine.start()
    assert client.executor.at_gate.wait(HANG_S)
    client.add("in the inbox", timeout_s=4.0)
    client.add("in time", timeout_s=1000.0, max_tokens=3)
    now_s = 105.0
    client.executor.gate.set()
    assert client.reason("running") is FinishReason.DEADLINE
    assert client.tokens("running") == greedy(6, 1)
    assert [client.reason("waiting", index) for index in range(2)] == [FinishReason.DEADLINE] * 2
    assert client.reason("in the inbox") is FinishReason.DEADLINE
    assert client.reason("in time") is FinishReason.LENGTH


def test_what_steps_take_decides_what_is_begun(make_client: Callable[..., Client]) -> None:
    """A step takes a second here. A request that has two seconds for sixteen tokens ends before it begins."""
    now_s = 0.0

    def clock() -> float:
        return now_s

    def second() -> None:
        nonlocal now_s
        now_s += 1.0

    client = make_client(max_num_seqs=1, clock=clock)
    client.executor.before_step = second
    client.add("first", max_tokens=16)
    client.engine.start()
    client.reason("first")
    client.add("runs", max_tokens=100)
    client.wait_for_tokens("runs", 1)
    client.add("late", timeout_s=2.0, max_tokens=16)
    assert client.reason("late") is FinishReason.SHED
    assert client.tokens("late") == []
    assert client.engine.wait_s() is not None


# -- drain and shutdown ------------------------------------------------------------------------


def test_drain_waits_for_the_last_end(make_client: Callable[..., Client]) -> None:
    """Running and waiting requests are finished; new ones are refused."""
    client = make_client(max_num_seqs=1)
    client.executor.gate.clear()
    client.add("a")
    client.add("b")
    client.engine.start()
    assert not client.engine.drain(0.0)
    with pytest.raises(EngineStoppedError):
        client.add("late")
    client.executor.gate.set()
    assert client.engine.drain(HANG_S)
    assert {output.finish_reason for output in client.outputs} == {None, FinishReason.LENGTH}


def test_shutdown_aborts_what_is_left(make_client: Callable[..., Client]) -> None:
    """One runs, one waits, one is not even taken from the inbox: each ends once, and nothing comes after."""
    client = make_client(max_num_seqs=1)
    client.executor.gate.clear()
    client.add("running", max_tokens=200)
    client.add("waiting", n=2)
    client.engine.start()
    assert client.executor.at_gate.wait(HANG_S)
    client.add("in the inbox")
    client.then = client.engine.shutdown
    client.executor.gate.set()
    client.engine.shutdown()
    assert client.reason("running") is FinishReason.ABORT
    assert [client.reason("waiting", index) for index in range(2)] == [FinishReason.ABORT] * 2
    assert client.reason("in the inbox") is FinishReason.ABORT
    assert client.engine.failure is None


def test_shutdown_while_idle_and_again(client: Client) -> None:
    client.engine.start()
    client.engine.shutdown()
    client.engine.shutdown()
    with pytest.raises(EngineStoppedError):
        client.add("late")


def test_shutdown_before_the_start(client: Client) -> None:
    """Then a start ends what was accepted, and stops."""
    client.add("a")
    client.engine.shutdown()
    client.engine.start()
    assert client.reason("a") is FinishReason.ABORT


def test_many_threads(client: Client) -> None:
    """Requests added and aborted from eight threads at once: each of them ends."""

    def use(thread: int) -> None:
        for index in range(20):
            name = f"{thread}.{index}"
            client.add(name, 1 + index, n=1 + index % 2, max_tokens=1 + index % 5)
            if index % 3 == 0:
                client.engine.abort(RequestId(name))
            client.reason(name)

    client.engine.start()
    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert client.engine.drain(HANG_S)
    client.scheduler.check_integrity()
    assert len(client.accepted) == 8 * 30


def test_time_that_was_waited_at_other_workers_counts() -> None:
    """Each that sheds it would otherwise give the next one all the time again."""
    client = Client()
    client.scheduler.config = replace(client.scheduler.config, max_wait_s=4.0)
    request = Request(RequestId("r"), (1,), SamplingParams(), waited_s=3.0)
    limits = client.engine._time_limits(request)
    assert limits.first_token_by_s - limits.begin_s == pytest.approx(1.0)
    client.close()
