"""The first of several ranks: tells the others what to compute, computes its own part, and watches over them.

    engine thread         TPExecutor.execute: encode the plan, send it to all, execute it here
    one thread a rank     receives what it says; a connection that ends is a rank that is gone
    one thread            asks every rank each second whether it is there, whatever it is doing

The worker lives and dies as one. When a rank is lost, `on_lost` is called, once, from any of these threads, before
anybody hears that a step failed; then the other ranks are ended, which also ends a step that waits for them. Ranks end
by themselves when their connection to this process does.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from pagoda.worker.config import EngineConfig
from pagoda.worker.errors import RankLostError
from pagoda.worker.executor import Executor
from pagoda.worker.parallel import TPContext, join, meeting_point
from pagoda.worker.rank_link import Kind, RankLink, RankListener, RankSeat
from pagoda.worker.step_codec import StepEncoder
from pagoda.worker.types import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

START_DEADLINE_S = 180.0
"""Until all ranks' processes run and have dialled; loading comes after that, and takes as long as it takes."""
PING_PERIOD_S = 1.0
MAX_UNANSWERED = 10
"""Pings in a row after which a rank counts as hanging. Answering takes none of the rank's time for computing."""
ACK_PERIOD = 16
"""Ranks say that they are done after every so many plans."""
MAX_AHEAD = 4 * ACK_PERIOD
"""Plans that may be on their way to a rank."""
_EXPLAIN_S = 2.0
"""How long a failed step waits for word of a rank that is gone, which would be why."""
_TOLD_S = 10.0
_END_S = 10.0
"""How long ranks have to end by themselves."""
_POLL_S = 0.1


class RankProcesses(Protocol):
    """The processes of all ranks but the first. Every method may be called from any thread."""

    def problem(self, suspect: int | None = None) -> str | None:
        """Which rank's process has ended, and how, if one has; of several that of `suspect`."""
        ...

    def kill(self) -> None:
        """End them all, whatever they are doing, and leave nothing of them. May be called twice."""
        ...


StartRanks = Callable[[EngineConfig, Sequence[RankSeat]], RankProcesses]
"""Starts a process for each seat, which calls `run_rank`. Does not wait for them."""
OnLost = Callable[[RankLostError], None]


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """Where the ranks of a worker are."""

    host: str
    """An address of this process's host that all ranks can dial."""
    start: StartRanks


class OtherRanks:
    """All ranks but the first."""

    def __init__(self, config: EngineConfig, places: RankPlaces) -> None:
        """Start them and wait until all have dialled. Raises `RankLostError`, naming the one that does not come."""
        size = config.tensor_parallel_size
        self._host = places.host
        self._size = size
        self._changed = threading.Condition()
        """Guards what follows."""
        self._ready: set[int] = set()
        self._num_acknowledged = dict.fromkeys(range(1, size), 0)
        self._num_unanswered = dict.fromkeys(range(1, size), 0)
        self._is_losing = False
        """A rank is lost, and `_error` will say how."""
        self._error: RankLostError | None = None
        self._is_ending = False
        self._on_lost: OnLost | None = None
        self._told = threading.Event()
        """Set once whoever is to be told of the loss has been."""
        self._num_sent = 0

        token = secrets.token_bytes(32)
        listener = RankListener(places.host, size=size, token=token)
        seats = [RankSeat(rank, size, places.host, listener.port, token) for rank in range(1, size)]
        try:
            self._processes = places.start(config, seats)
        except BaseException:
            listener.close()
            raise
        try:
            self._links = listener.accept_all(START_DEADLINE_S, self._processes.problem)
        except BaseException:
            self._processes.kill()
            raise
        self._threads = [
            threading.Thread(target=self._receive, args=(rank, link), name=f"rank-{rank}", daemon=True)
            for rank, link in self._links.items()
        ]
        self._stop_pinging = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="rank-ping", daemon=True)
        for thread in (*self._threads, self._pinging):
            thread.start()

    def meet(self, device: torch.device) -> TPContext:
        """Meet them in a process group. Raises `RankLostError` if one of them fails meanwhile."""
        listener = meeting_point(self._host)
        port: int = listener.getsockname()[1]
        try:
            self._send(Kind.MEET, str(port).encode())
        except RankLostError as error:
            listener.close()
            raise self.explain(error) from error
        met: Future[TPContext] = Future()

        def meet() -> None:
            try:
                met.set_result(join(0, self._size, host=self._host, port=port, device=device, listener=listener))
            except Exception as error:  # noqa: BLE001  (whatever torch raises)
                met.set_exception(error)

        # On a thread of its own: torch waits for a rank that has failed as for one that is late.
        threading.Thread(target=meet, name="rank-meeting", daemon=True).start()
        met.add_done_callback(lambda _: self._notify())
        with self._changed:
            self._changed.wait_for(lambda: met.done() or self._error is not None)
            if self._error is not None:
                raise self._error
        try:
            return met.result()
        except Exception as error:
            raise RankLostError(f"the {self._size} ranks did not meet: {error}") from error

    def wait_until_ready(self) -> None:
        """Return once all have loaded their share. Raises `RankLostError` if one of them fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._ready) == len(self._links))
            if self._error is not None:
                raise self._error

    def watch(self, on_lost: OnLost) -> None:
        """From now on `on_lost` is called when a rank is lost; at once if one is already."""
        with self._changed:
            self._on_lost = on_lost
            error = self._error
        if error is not None:
            self._tell(error, on_lost)

    def send_plan(self, data: bytes) -> None:
        """Send all of them a plan; waits while one is far behind. Raises `RankLostError`."""
        self._num_sent += 1
        if self._num_sent > MAX_AHEAD:  # before, nobody can be behind
            oldest = self._num_sent - MAX_AHEAD
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error is not None or min(self._num_acknowledged.values()) >= oldest
                )
        if self._error is not None:
            raise self._error
        self._send(Kind.PLAN, data)

    def explain(self, error: Exception) -> RankLostError:
        """What to raise for what failed here with `error`. When this returns, `on_lost` has been called."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, _EXPLAIN_S)
        self._lose(lambda: f"rank 0 failed: {type(error).__name__}: {error}")  # unless another is lost already
        self._told.wait(_TOLD_S)
        return self._error or RankLostError(str(error))

    def end(self) -> None:
        """Tell them to end, and see to it."""
        with self._changed:
            self._is_ending = True
            is_lost = self._error is not None
        self._stop_pinging.set()
        self._pinging.join(_END_S)  # or the end might find a link busy
        if not is_lost:
            for link in self._links.values():
                with suppress(OSError):
                    link.try_send(Kind.END)
            for thread in self._threads:
                thread.join(_END_S / len(self._threads))
        self._cut_off()
        for thread in self._threads:
            thread.join(_END_S)
        for link in self._links.values():
            link.close()

    # -- threads of their own --------------------------------------------------------------------

    def _receive(self, rank: int, link: RankLink) -> None:
        try:
            while True:
                kind, body = link.receive()
                with self._changed:
                    self._num_unanswered[rank] = 0
                    if kind is Kind.READY:
                        self._ready.add(rank)
                    elif kind is Kind.DONE:
                        self._num_acknowledged[rank] += ACK_PERIOD
                    self._changed.notify_all()
                if kind is Kind.FAILED:
                    reason = body.decode(errors="replace")
                    self._lose(lambda: f"rank {rank} failed: {reason}")  # noqa: B023  (called before the next message)
        except (OSError, EOFError):
            self._lose(lambda: self._how_gone(rank))

    def _ping(self) -> None:
        while not self._stop_pinging.wait(PING_PERIOD_S):
            for rank, link in self._links.items():
                with self._changed:
                    self._num_unanswered[rank] += 1
                    is_hanging = self._num_unanswered[rank] > MAX_UNANSWERED
                if is_hanging:
                    self._lose(lambda: f"rank {rank} does not answer")  # noqa: B023  (called at once)
                    return
                try:
                    link.try_send(Kind.PING)
                except OSError:
                    return  # whoever receives from it says so

    # -- losing one ------------------------------------------------------------------------------

    def _how_gone(self, rank: int) -> str:
        self._stop_pinging.wait(_POLL_S)  # a process ends a moment after its connections
        problem = self._processes.problem(rank)
        return f"rank {rank} is gone" + ("" if problem is None else f": {problem}")

    def _lose(self, describe: Callable[[], str]) -> None:
        """The first loss is what counts; what others fail with then follows from it."""
        with self._changed:
            if self._is_losing or self._is_ending:
                return
            self._is_losing = True
        error = RankLostError(describe())
        with self._changed:
            self._error = error
            self._changed.notify_all()
            on_lost = self._on_lost
        if on_lost is None:
            self._told.set()
        else:
            self._tell(error, on_lost)
        self._cut_off()

    def _tell(self, error: RankLostError, on_lost: OnLost) -> None:
        try:
            on_lost(error)
        except Exception:
            logger.exception("whoever is to hear of it failed: %s", error)
        finally:
            self._told.set()

    def _cut_off(self) -> None:
        """End them all now. Whoever waits for one of them hears that it is gone."""
        for link in self._links.values():
            link.hang_up()
        self._processes.kill()

    def _send(self, kind: Kind, body: bytes) -> None:
        """Raises `RankLostError`; whoever receives from that rank says more."""
        for rank, link in self._links.items():
            try:
                link.send(kind, body)
            except OSError as error:
                raise RankLostError(f"rank {rank} is gone: {error}") from error

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class TPExecutor:
    """Implements `Executor` in the first rank's process, over all ranks."""

    def __init__(self, own: Executor, context: TPContext, others: OtherRanks) -> None:
        """`own` executes this rank's part."""
        self._own = own
        self._context = context
        self._others = others
        self._encoder = StepEncoder()

    def watch(self, on_lost: OnLost) -> None:
        """From now on `on_lost` is called when a rank is lost; at once if one is already."""
        self._others.watch(on_lost)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Raises `RankLostError`, whatever went wrong: the ranks are no longer at the same point."""
        try:
            self._others.send_plan(self._encoder.encode(plan))
            return self._own.execute(plan)
        except Exception as error:
            raise self._others.explain(error) from error

    def shutdown(self) -> None:
        self._others.end()
        self._own.shutdown()
        self._context.leave()


def start_tensor_parallel(
    config: EngineConfig, places: RankPlaces, device: torch.device, build_own: Callable[[TPContext], Executor]
) -> TPExecutor:
    """Start the other ranks, meet them, build this rank's own part while they build theirs.

    Raises `RankLostError`, naming the rank, if one of them cannot start; and whatever `build_own` does.
    """
    others = OtherRanks(config, places)
    try:
        context = others.meet(device)
        own = build_own(context)
        others.wait_until_ready()
    except BaseException:
        others.end()
        raise
    return TPExecutor(own, context, others)
