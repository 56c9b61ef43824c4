"""The engine's thread: requests in, tokens out, and exactly one end for each sequence however things go wrong."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from fakes import Failure, FakeExecutor, generate

from pagoda.worker import engine as engine_module
from pagoda.worker.block_hash import HashDomain
from pagoda.worker.block_pool import BlockPool
from pagoda.worker.config import EngineLimits, SchedulerConfig
from pagoda.worker.engine import MAX_FAILED_STEPS, Engine
from pagoda.worker.errors import EngineStoppedError, IntegrityError, InvalidRequestError, OverloadedError
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.types import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestId,
    SamplingParams,
    SchedulerOutput,
    SequenceOutput,
)

BLOCK_SIZE = 4
VOCAB_SIZE = 64
HANG_S = 30.0
"""Longer than anything here takes: waiting this long means it never comes."""


class GatedExecutor(FakeExecutor):
    """Runs no step while its gate is closed, and tells when one has come to the gate."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.at_gate.set()
        assert self.gate.wait(HANG_S)
        return super().execute(plan)


class Client:
    """An engine on a gated fake rank, and all that came from it."""

    def __init__(self, *, num_blocks: int = 64, max_num_seqs: int = 8, max_num_waiting: int = 64) -> None:
        self.limits = EngineLimits(num_blocks * BLOCK_SIZE, VOCAB_SIZE, max_num_seqs, max_num_waiting)
        manager = KVManager(BlockPool(num_blocks), num_groups=1, block_size=BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_num_waiting=max_num_waiting),
            self.limits,
            manager,
            eos_token_ids=frozenset(),
        )
        self.executor = GatedExecutor()
        self.then: Callable[[], None] | None = None
        """What a test wants done on the engine's thread whenever it has handed over outputs."""
        self.outputs: list[SequenceOutput] = []
        self.accepted: list[tuple[str, int]] = []
        self._changed = threading.Condition()
        self.engine = Engine(
            self.scheduler,
            self.executor,
            HashDomain(b"weights", "", "float32", "", BLOCK_SIZE),
            on_outputs=self._take,
        )

    def add(self, name: str, num_tokens: int = 6, *, priority: int = 0, salt: bytes = b"", **sampling: object) -> None:
        """Add a request, by default greedy."""
        prompt = tuple(range(num_tokens))
        params = SamplingParams(**({"temperature": 0.0} | sampling))
        self.executor.roots[RequestId(name)] = salt
        self.engine.add(Request(RequestId(name), prompt, params, priority=priority, salt=salt))
        self.accepted += [(name, index) for index in range(params.n)]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for output in self._outputs_of(name, index) for token in output.token_ids]

    def end(self, name: str, index: int = 0) -> SequenceOutput:
        """A sequence's last output; waits for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_ended(name, index), HANG_S), f"{name} does not end"
            return self._outputs_of(name, index)[-1]

    def reason(self, name: str, index: int = 0) -> FinishReason | None:
        """Why a sequence ended; waits for that."""
        return self.end(name, index).finish_reason

    def wait_for_tokens(self, name: str, num_tokens: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(name)) >= num_tokens, HANG_S)

    def close(self) -> None:
        """Whatever happened: the thread ends, the executor was shut down once, and each sequence ended once."""
        self.executor.gate.set()
        self.engine.shutdown()
        thread = self.engine._thread
        assert not thread.is_alive()
        if thread.ident is not None:
            assert self.executor.num_shutdowns == 1
            ends = [(output.request_id, output.index) for output in self.outputs if output.finish_reason is not None]
            assert Counter(ends) == Counter(self.accepted)

    def _outputs_of(self, name: str, index: int) -> list[SequenceOutput]:
        return [output for output in self.outputs if (output.request_id, output.index) == (name, index)]

    def _has_ended(self, name: str, index: int) -> bool:
        outputs = self._outputs_of(name, index)
        return bool(outputs) and outputs[-1].finish_reason is not None

    def _take(self, outputs: list[SequenceOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()
        if self.then is not None:
            self.then()


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    """Makes clients, and closes them after the test."""
    clients: list[Client] = []

    def make(**limits: int) -> Client:
        clients.append(Client(**limits))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


def expected(num_prompt_tokens: int, sampling: SamplingParams) -> list[int]:
    """What a request with a seed, or a greedy one, gets."""
    seed = sampling.seed or 0
    return generate(range(num_prompt_tokens), sampling, seed, max_model_len=1000, vocab_size=VOCAB_SIZE)[0]


def greedy(num_prompt_tokens: int, max_tokens: int = 16) -> list[int]:
    return expected(num_prompt_tokens, SamplingParams(temperature=0.0, max_tokens=max_tokens))


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


# -- aborts ------------------------------------------------------------------------------------


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


def test_sample_that_its_reader_found_whole(client: Client) -> None:
    """A stop string: the sample ends as stopped, the other one goes on."""
    client.add("a", n=2, max_tokens=200)
    client.engine.start()
    client.wait_for_tokens("a", 3)
    client.engine.abort(RequestId("a"), 0, FinishReason.STOP)
    assert client.reason("a", 0) is FinishReason.STOP
    assert client.reason("a", 1) is FinishReason.LENGTH


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


def test_overload_is_refused(make_client: Callable[..., Client]) -> None:
    """Samples count, not requests: one may run and three may wait here. What ended makes room again."""
    client = make_client(max_num_seqs=1, max_num_waiting=3)
    client.add("a", n=3)
    with pytest.raises(OverloadedError):
        client.add("b", n=2)
    client.add("c")
    with pytest.raises(OverloadedError):
        client.add("d")
    client.engine.start()
    for index in range(3):
        client.reason("a", index)
    client.reason("c")
    client.add("e")
    assert client.reason("e") is FinishReason.LENGTH


# -- failures ----------------------------------------------------------------------------------


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
