"""Sends a workload on time and notes what comes back.

Open loop: sessions begin when they are due, whatever the server does. Closed loop: so many sessions at a time, each
followed by the next; a second later if it failed, so that a dead server is not asked a thousand times a second.
Within a session a turn is due when the answer before it has ended and its pause is over. Nothing is sent that is due
after the test's duration; what was sent is waited for.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

from pagoda.cluster.loadtest.arrivals import ArrivalKind, arrivals
from pagoda.cluster.loadtest.records import RequestRecord, record_of
from pagoda.cluster.loadtest.target import Answer, LoadRequest, Message, SendError, Target
from pagoda.cluster.loadtest.workloads import Session, Workload

_TICK_S = 0.02
_SAY_PERIOD_S = 1.0
_PAUSE_AFTER_FAILURE_S = 1.0
_MAX_SEED = 2**31
"""Every server takes these."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a workload is sent. Exactly one of `rate`, `concurrency` and `as_recorded`."""

    duration_s: float = 60.0
    rate: float | None = None
    """Sessions per second that begin."""
    arrivals: ArrivalKind = "poisson"
    burst_size: int = 8
    concurrency: int | None = None
    """Sessions at a time."""
    as_recorded: bool = False
    """Sessions begin at times of their own."""
    max_sessions: int | None = None
    seed: int = 0
    sampling_seeds: bool = False
    """Whether each request has a seed of its own, the same in each run, so that sampled answers can be compared."""


@dataclass(slots=True)
class LoadState:
    """How far a load test is."""

    elapsed_s: float = 0.0
    num_sessions: int = 0
    num_running: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    """Pieces of text, as far as they have come."""


@dataclass(slots=True)
class LoadResult:
    """What a load test saw, and how it fared itself."""

    records: list[RequestRecord]
    requests: dict[tuple[int, int], LoadRequest]
    """What was sent, by session and turn; empty if that was not to be kept."""
    duration_s: float
    """Until the last answer ended."""
    client_cpu_ratio: float
    """Of one core."""
    tick_lag_s: list[float] = field(default_factory=list)
    """How late the client's own timer was, again and again: it is late when the client has too much to do."""
    was_interrupted: bool = False


class LoadRunner:
    """One load test. `on_progress` is called every second; prompts of long tests are much to keep."""

    def __init__(
        self,
        workload: Workload,
        target: Target,
        options: LoadOptions,
        *,
        on_progress: Callable[[LoadState], None] = lambda _: None,
        keep_requests: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workload = workload
        self._target = target
        self._options = options
        self._on_progress = on_progress
        self._keep_requests = keep_requests
        self._clock = clock
        self._begin_s = 0.0
        self._state = LoadState()
        self._records: list[RequestRecord] = []
        self._requests: dict[tuple[int, int], LoadRequest] = {}
        self._running: dict[tuple[int, int], Answer] = {}
        self._tick_lag_s: list[float] = []

    async def run(self) -> LoadResult:
        """Run to the end; if cancelled, what was running counts as interrupted."""
        self._begin_s, cpu_s = self._clock(), time.process_time()
        was_interrupted = False
        async with self._watched():
            try:
                await (self._closed() if self._options.concurrency else self._open())
            except asyncio.CancelledError:
                was_interrupted = True
        elapsed_s = self._now()
        return LoadResult(
            sorted(self._records, key=lambda record: record.sent_s),
            self._requests,
            max((record.end_s for record in self._records), default=elapsed_s),
            (time.process_time() - cpu_s) / max(elapsed_s, 1e-9),
            self._tick_lag_s,
            was_interrupted,
        )

    def _now(self) -> float:
        return self._clock() - self._begin_s

    def _sessions(self) -> Iterator[Session]:
        return islice(self._workload.sessions(self._options.seed), self._options.max_sessions)

    async def _open(self) -> None:
        options = self._options
        times = None
        if not options.as_recorded:
            assert options.rate is not None
            draw = random.Random(f"{options.seed} arrivals")
            times = arrivals(options.arrivals, options.rate, draw, burst_size=options.burst_size)
        async with asyncio.TaskGroup() as running:
            for session in self._sessions():
                start_s = session.start_s if times is None else next(times)
                assert start_s is not None
                if start_s >= options.duration_s:
                    break
                await self._sleep_until(start_s)
                running.create_task(self._converse(session, start_s))

    async def _closed(self) -> None:
        sessions = self._sessions()

        async def one_after_the_other() -> None:
            for session in sessions:
                if self._now() >= self._options.duration_s:
                    return
                if not await self._converse(session, self._now()):
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as running:
            for _ in range(self._options.concurrency or 0):
                running.create_task(one_after_the_other())

    async def _sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - self._now()))  # also if late: others have to go on

    async def _converse(self, session: Session, start_s: float) -> bool:
        """Turn after turn, until one fails: there is no next question without an answer. Whether none did."""
        self._state.num_sessions += 1
        is_chat = not isinstance(session.turns[0].prompt, tuple)
        messages: list[Message] = [{"role": "system", "content": session.system}] if session.system else []
        due_s = ended_s = start_s
        for index, turn in enumerate(session.turns):
            if index:
                due_s = ended_s + turn.pause_s
                if due_s >= self._options.duration_s:
                    break
                await self._sleep_until(due_s)
            if is_chat:
                messages.append({"role": "user", "content": str(turn.prompt)})
                request = LoadRequest(turn.max_tokens, tuple(messages))
            else:
                request = LoadRequest(turn.max_tokens, prompt=turn.prompt)
            if self._options.sampling_seeds:
                draw = random.Random(f"{self._options.seed} sampling {session.number} {index}")
                request = replace(request, seed=draw.randrange(1, _MAX_SEED))
            answer = await self._ask(request, session.number, index, due_s)
            if answer is None:
                return False
            ended_s = self._now() if answer.end_s is None else answer.end_s - self._begin_s
            messages.append({"role": "assistant", "content": "".join(answer.text)})
        return True

    async def _ask(self, request: LoadRequest, session: int, turn: int, due_s: float) -> Answer | None:
        """The answer; None if it failed."""
        if self._keep_requests:
            self._requests[session, turn] = request
        answer, error, sent_s = Answer(), None, self._now()
        self._running[session, turn] = answer
        try:
            await self._target.send(request, answer)
        except SendError as problem:
            error = problem
        except asyncio.CancelledError:
            error = SendError("interrupted", "the load test was stopped")
            raise
        except Exception as problem:  # noqa: BLE001  (whatever goes wrong with one request, the others go on)
            error = SendError("client", f"{type(problem).__name__}: {problem}")
        finally:
            answer.piece_s = [at - self._begin_s for at in answer.piece_s]
            end_s = self._now() if answer.end_s is None or error else answer.end_s - self._begin_s
            record = record_of(
                request, answer, session, turn, intended_s=due_s, sent_s=sent_s, end_s=end_s, error=error
            )
            del self._running[session, turn]
            self._note(record)
        return answer if error is None else None

    def _note(self, record: RequestRecord) -> None:
        self._records.append(record)
        state = self._state
        state.num_tokens += len(record.gaps_s) + (record.first_s is not None)
        if record.error is None:
            state.num_succeeded += 1
        else:
            state.num_failed += 1

    def _state_at(self, now_s: float) -> LoadState:
        running = self._running.values()
        num_tokens = self._state.num_tokens + sum(len(answer.piece_s) for answer in running)
        return replace(self._state, elapsed_s=now_s, num_running=len(running), num_tokens=num_tokens)

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Meanwhile, tell how far it is and measure how late a timer is."""

        async def watch() -> None:
            next_s = _SAY_PERIOD_S
            while True:
                due_s = self._now() + _TICK_S
                await asyncio.sleep(_TICK_S)
                now_s = self._now()
                self._tick_lag_s.append(max(0.0, now_s - due_s))
                if now_s >= next_s:
                    next_s = now_s + _SAY_PERIOD_S
                    self._on_progress(self._state_at(now_s))

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
