"""Several ranks, real processes, without a model: the same tokens as one rank, and one end for all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from local_server import DEADLINE_S, wait_until
from tiny_model import write_tiny_model

from pagoda.worker import tensor_parallel
from pagoda.worker.build import build_engine, build_rank
from pagoda.worker.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda.worker.engine import Engine
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.errors import EngineStoppedError, RankLostError
from pagoda.worker.executor import Executor
from pagoda.worker.fake_runner import FakeRunner
from pagoda.worker.local_ranks import LOCAL_RANKS, LocalRanks
from pagoda.worker.parallel import TPContext
from pagoda.worker.rank_link import RankSeat
from pagoda.worker.tensor_parallel import RankPlaces, RankProcesses, TPExecutor, start_tensor_parallel
from pagoda.worker.types import (
    FinishReason,
    ModelRunnerOutput,
    NewSequence,
    Request,
    RequestId,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
)

ENDLESS = 400
"""Tokens of a request that still runs when whatever a test does to it happens, in steps of a tenth of a second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """Whatever happened to it."""
    yield
    wait_until(lambda: not ranks_of(os.getpid()), "no process of a rank is left")


def ranks_of(parent: int) -> list[int]:
    """The ranks that a process has started, dead ones that nobody waits for among them; in order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            command = (stat.parent / "cmdline").read_text()
            if int(ppid) == parent and ("rank_process" in command or state == "Z"):
                found.append(int(stat.parent.name))
    return sorted(found)


class Worker:
    """An engine over some ranks, and all that came from it."""

    def __init__(self, folder: Path, num_ranks: int, *, step_s: float = 0.0, num_blocks: int = 128) -> None:
        config = EngineConfig(
            folder,
            device="cpu",
            num_threads=1,
            fake_step_s=step_s,
            tensor_parallel_size=num_ranks,
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
        )
        self._changed = threading.Condition()
        self.num_added = 0
        self.events: list[SequenceOutput | RankLostError] = []
        """Outputs and the loss of a rank, in order."""
        self.engine: Engine = build_engine(
            config,
            on_outputs=self._take,
            progress=lambda *_: None,
            on_lost=lambda error: self._take([error]),
        )
        self.engine.start()

    def _take(self, events: Sequence[SequenceOutput | RankLostError]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def add(self, name: str, num_tokens: int = 10, **sampling: object) -> None:
        params = SamplingParams(**({"max_tokens": 40, "seed": 1, "ignore_eos": True} | sampling))
        self.engine.add(Request(RequestId(name), tuple(range(5, 5 + num_tokens)), params))
        self.num_added += params.n

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, DEADLINE_S), self.events

    @property
    def outputs(self) -> list[SequenceOutput]:
        return [event for event in self.events if isinstance(event, SequenceOutput)]

    @property
    def losses(self) -> list[RankLostError]:
        return [event for event in self.events if isinstance(event, RankLostError)]

    def ends(self) -> dict[tuple[str, int], FinishReason]:
        return {(o.request_id, o.index): o.finish_reason for o in self.outputs if o.finish_reason is not None}

    def tokens(self) -> dict[tuple[str, int], list[int]]:
        tokens: dict[tuple[str, int], list[int]] = {}
        for output in self.outputs:
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        return tokens


@contextmanager
def worker(folder: Path, num_ranks: int, **options: float) -> Iterator[Worker]:
    running = Worker(folder, num_ranks, **options)
    try:
        yield running
    finally:
        running.engine.shutdown()


# -- tokens --------------------------------------------------------------------------------------


def test_two_and_three_ranks_say_what_one_says(folder: Path) -> None:
    """Prompts in chunks, shared prefixes, samples, an abort, and too few blocks, so that sequences are preempted.

    Every rank of fakes computes all tokens and ends the worker if they are not the first one's.
    """
    answers, preemptions = [], []
    for num_ranks in (1, 2, 3):
        with worker(folder, num_ranks, num_blocks=40) as w:
            for number in range(6):
                w.add(f"long {number}", 30 + number, seed=number)
            w.add("greedy", 50, temperature=0)
            w.add("samples", 17, n=3, stop_token_ids=(9,), logit_bias={5: 1.0}, stop=("x",))
            w.add("aborted", 20, max_tokens=80)
            w.wait_for(lambda w=w: ("aborted", 0) in w.tokens())
            w.engine.abort(RequestId("aborted"))
            w.wait_for(lambda w=w: len(w.ends()) == 11)
            tokens = w.tokens()
            del tokens["aborted", 0]
            answers.append(tokens)
            preemptions.append(w.engine.stats().num_preemptions)
            assert not w.losses
    assert all(preemptions)
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 10


def test_generate_writes_nothing_but_results(folder: Path) -> None:
    """The command, as a user runs it: with two ranks byte for byte what one writes."""
    lines = [{"prompt": f"line {number}", "max_tokens": 9, "seed": number} for number in range(4)]
    outputs = [
        subprocess.run(
            [Path(sys.executable).with_name("pagoda"), "generate", "--model", folder, "--fake-step-s", "0", *ranks],
            input="\n".join(map(json.dumps, lines)),
            capture_output=True,
            text=True,
            timeout=4 * DEADLINE_S,
            check=True,
        ).stdout
        for ranks in ([], ["--tp", "2"])
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 4


# -- ranks that are lost -------------------------------------------------------------------------


def assert_dies_as_one(w: Worker, message: str) -> None:
    """All requests end with an error, after the loss was told; nothing more is taken; nobody is left."""
    w.wait_for(lambda: len(w.ends()) == w.num_added)
    w.engine._thread.join(DEADLINE_S)
    (loss,) = w.losses
    assert message in str(loss)
    assert w.engine.failure is loss
    after = w.events[w.events.index(loss) :]
    assert set(w.ends().values()) <= {FinishReason.ERROR}
    assert sum(isinstance(event, SequenceOutput) and event.finish_reason is not None for event in after) == w.num_added
    with pytest.raises(EngineStoppedError):
        w.add("late")
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rank_killed_while_idle(folder: Path, num_ranks: int) -> None:
    with worker(folder, num_ranks) as w:
        os.kill(ranks_of(os.getpid())[-1], signal.SIGKILL)
        w.wait_for(lambda: bool(w.losses))
        assert_dies_as_one(
            w, f"rank {num_ranks - 1} is gone: the process of rank {num_ranks - 1} was ended by signal 9"
        )


def test_rank_killed_while_busy(folder: Path) -> None:
    """Some requests have had tokens, others wait for a place."""
    with worker(folder, 3, step_s=0.1) as w:
        for number in range(12):
            w.add(str(number), max_tokens=ENDLESS)
        w.wait_for(lambda: len(w.tokens()) == 8)
        os.kill(ranks_of(os.getpid())[0], signal.SIGKILL)
        w.wait_for(lambda: bool(w.losses))
        assert_dies_as_one(w, "rank 1")


@pytest.mark.parametrize("is_busy", [False, True])
def test_rank_that_hangs(folder: Path, is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it closes no connection. What is written to it is not read either, so a step may hang too."""
    monkeypatch.setattr(tensor_parallel, "PING_PERIOD_S", 0.1)
    with worker(folder, 2) as w:
        if is_busy:
            w.add("a", max_tokens=ENDLESS)
            w.wait_for(lambda: bool(w.tokens()))
        os.kill(ranks_of(os.getpid())[0], signal.SIGSTOP)
        w.wait_for(lambda: bool(w.losses))
        assert_dies_as_one(w, "rank 1 does not answer")


def test_rank_in_a_long_step_is_not_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers while it computes: the step takes twice as long as a rank may be silent."""
    monkeypatch.setattr(tensor_parallel, "PING_PERIOD_S", 0.1)
    with worker(folder, 2, step_s=2 * 0.1 * tensor_parallel.MAX_UNANSWERED) as w:
        w.add("a", max_tokens=1)
        w.wait_for(lambda: bool(w.ends()))
        assert w.ends() == {("a", 0): FinishReason.LENGTH}
        assert not w.losses


def test_signals_of_the_terminal_are_for_the_first_rank(folder: Path) -> None:
    """Ranks that ended at Ctrl-C would fail what the first one still lets run to its end."""
    with worker(folder, 2) as w:
        (rank,) = ranks_of(os.getpid())
        assert os.getpgid(rank) != os.getpgid(0)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            os.kill(rank, signal_number)
        w.add("a")
        w.wait_for(lambda: bool(w.ends()))
        assert w.ends() == {("a", 0): FinishReason.LENGTH}


FIRST_RANK = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_tensor_parallel import ENDLESS, Worker
w = Worker(Path(sys.argv[2]), 3, step_s=0.1)
if sys.argv[3] == "busy":
    w.add("a", max_tokens=ENDLESS)
    w.wait_for(lambda: bool(w.tokens()))
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_ranks_end_with_the_first(folder: Path, what: str) -> None:
    """However that ends, and whatever they are doing."""
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_RANK, here, folder, what],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(here.parent)])},
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        ranks = ranks_of(first.pid)
        assert len(ranks) == 2
        first.kill()
    wait_until(lambda: not any(is_running(rank) for rank in ranks), "the ranks have ended")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- ranks that do not start, steps that fail ----------------------------------------------------


def start(folder: Path, places: RankPlaces, num_ranks: int = 3) -> TPExecutor:
    """An executor over ranks that are started so, without an engine."""
    config = EngineConfig(folder, device="cpu", fake_step_s=0.0, tensor_parallel_size=num_ranks)
    plan = plan_engine(config)
    return start_tensor_parallel(
        config, places, torch.device("cpu"), lambda context: build_rank(plan, config, context, lambda *_: None)
    )


class Several:
    """Implements `RankProcesses` over ranks that were started apart."""

    def __init__(self, *parts: RankProcesses) -> None:
        self.parts = parts

    def problem(self, suspect: int | None = None) -> str | None:
        return next((problem for part in self.parts if (problem := part.problem(suspect)) is not None), None)

    def kill(self) -> None:
        for part in self.parts:
            part.kill()


def test_rank_that_cannot_load(folder: Path) -> None:
    """Its node lacks the model, say. The first rank waits for it at that moment, in torch."""

    def start_ranks(config: EngineConfig, seats: Sequence[RankSeat]) -> RankProcesses:
        lacking = replace(config, model_path=folder / "elsewhere")
        return Several(LocalRanks(config, seats[:1]), LocalRanks(lacking, seats[1:]))

    with pytest.raises(RankLostError, match=r"^rank 2 failed: ModelError: .*elsewhere"):
        start(folder, RankPlaces("127.0.0.1", start_ranks))


def test_rank_that_dies_before_it_dials(folder: Path) -> None:
    def start_ranks(config: EngineConfig, seats: Sequence[RankSeat]) -> RankProcesses:
        ranks = LocalRanks(config, seats)
        os.kill(ranks_of(os.getpid())[1], signal.SIGKILL)
        return ranks

    with pytest.raises(RankLostError, match=r"^the process of rank 2 was ended by signal 9"):
        start(folder, RankPlaces("127.0.0.1", start_ranks))


def test_rank_that_never_dials(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "START_DEADLINE_S", 0.2)
    with pytest.raises(RankLostError, match=r"^rank 1, 2 did not come"):
        start(folder, RankPlaces("127.0.0.1", lambda _config, _seats: Several()))


def listening_addresses(process: int) -> set[str]:
    """Where a process listens on TCP, IPv4 and IPv6."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(descriptor))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                addresses.add(socket.inet_ntop(socket.AF_INET, bytes.fromhex(fields[1].partition(":")[0])[::-1]))
    return addresses


def test_ranks_listen_where_they_are_told(folder: Path) -> None:
    """On that address alone, and not where this machine's name leads, which other nodes could not dial."""
    before = listening_addresses(os.getpid())
    executor = start(folder, RankPlaces("127.0.0.2", LocalRanks), num_ranks=3)
    executor.watch(lambda _: None)
    try:
        assert executor.execute(PLAN).sampled
        assert listening_addresses(os.getpid()) - before == {"127.0.0.2"}
        for rank in ranks_of(os.getpid()):
            assert listening_addresses(rank) <= {"127.0.0.1", "127.0.0.2"}  # from where the rank reaches the first
    finally:
        executor.shutdown()


def test_own_part_that_cannot_be_built(folder: Path) -> None:
    """Then the others end too; their processes are looked for after each test."""
    config = EngineConfig(folder, device="cpu", fake_step_s=0.0, tensor_parallel_size=2)

    def build(_context: TPContext) -> Executor:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        start_tensor_parallel(config, LOCAL_RANKS, torch.device("cpu"), build)


PLAN = SchedulerOutput(
    1,
    new=[NewSequence(SequenceId("a/0"), (5, 6), 0, 0, 0, ((0,),), SamplingParams(), 1, frozenset(), 2)],
    num_scheduled_tokens={SequenceId("a/0"): 2},
)


class Failing:
    """Implements `Executor`; fails."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        raise ValueError(f"no step {plan.step}")

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda _: Failing(), "^rank 0 failed: ValueError: no step 1"),
        (
            lambda context: FakeRunner(step_s=0.0, vocab_size=1000, context=context),
            "^rank 1 failed: IntegrityError: rank 1 computes",
        ),
    ],
    ids=["first", "other"],
)
def test_failed_step_is_the_end(
    folder: Path, build: Callable[[TPContext], Executor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whichever rank. Ranks at different points would compute on, each something else."""
    monkeypatch.setattr(tensor_parallel, "_EXPLAIN_S", 0.2)
    config = EngineConfig(folder, device="cpu", fake_step_s=0.0, tensor_parallel_size=2)
    executor = start_tensor_parallel(config, LOCAL_RANKS, torch.device("cpu"), build)
    losses: list[RankLostError] = []
    lost = threading.Event()
    executor.watch(lambda error: (losses.append(error), lost.set()))
    try:
        with suppress(RankLostError):  # the first one's own part may be done before another fails
            executor.execute(PLAN)
        assert lost.wait(DEADLINE_S)
        with pytest.raises(RankLostError, match=message):
            executor.execute(replace(PLAN, step=2))
        with pytest.raises(RankLostError, match=message):
            raise losses[0]
    finally:
        executor.shutdown()


def test_who_watches_late_hears_of_it(folder: Path) -> None:
    """A rank is lost before anybody can be told."""
    executor = start(folder, LOCAL_RANKS, num_ranks=2)
    try:
        os.kill(ranks_of(os.getpid())[0], signal.SIGKILL)
        wait_until(lambda: executor._others._error is not None, "the loss is noticed")
        with pytest.raises(RankLostError, match="rank 1 is gone"):
            executor.execute(SchedulerOutput(1))
        heard: list[RankLostError] = []
        executor.watch(heard.append)
        assert len(heard) == 1
    finally:
        executor.shutdown()


def test_nobody_runs_far_ahead(folder: Path) -> None:
    """Plans that compute nothing hold nobody up; a rank that is stopped would get them without end."""
    executor = start(folder, LOCAL_RANKS, num_ranks=2)
    executor.watch(lambda _: None)
    (rank,) = ranks_of(os.getpid())
    num_executed = 0

    def execute() -> None:
        nonlocal num_executed
        with suppress(RankLostError):
            while num_executed < 10 * tensor_parallel.MAX_AHEAD:
                executor.execute(SchedulerOutput(num_executed))
                num_executed += 1

    try:
        os.kill(rank, signal.SIGSTOP)
        thread = threading.Thread(target=execute)
        thread.start()
        wait_until(lambda: num_executed == tensor_parallel.MAX_AHEAD, "the first rank waits")
        thread.join(0.1)
        assert num_executed == tensor_parallel.MAX_AHEAD
        os.kill(rank, signal.SIGCONT)
        thread.join(DEADLINE_S)
        assert num_executed == 10 * tensor_parallel.MAX_AHEAD
    finally:
        executor.shutdown()
