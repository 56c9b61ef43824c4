"""Runs each request to its end, on one worker after the other if it must be: whoever reads the stream sees one.

Which worker that is, is said by the directory (`Placer`) and decided by whoever carries the call (`WorkerCalls`).
"""

import asyncio
import contextlib
import contextvars
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from pagoda.cluster.ingress.generation import RequestAbortedError
from pagoda.cluster.ingress.progress import RequestProgress
from pagoda.cluster.ingress.sessions import WorkerLostError, WorkerSessions
from pagoda.cluster.placer import Placer
from pagoda.worker.config import EngineLimits
from pagoda.worker.errors import EngineStoppedError, OverloadedError, PagodaError
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.types import MAX_SEED, Request, RequestId, SequenceOutput

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Workers that a new request is offered to, if they refuse it: others may have room. One that was accepted once is
offered until somebody takes it."""
MAX_FAILURES = 600
"""Calls in a row that are lost before a worker has taken the request, over ten minutes: something else is wrong."""
LAST_TOKENS_S = 5.0
"""After the end of a request's call, until its last tokens count as lost."""
_PAUSE_S = (0.02, 1.0)
"""Between two tries: the shortest and the longest, half as long again each time."""


class WorkerFullError(OverloadedError):
    """The worker that was chosen takes no more; what was known of it was old."""


class WorkerStoppingError(EngineStoppedError):
    """The worker that was chosen takes no requests any more, or not yet."""


_OTHERS_MAY_TAKE_IT = (WorkerFullError, WorkerStoppingError)


class WorkerCalls(Protocol):
    """How a request gets to a worker."""

    async def ping(self) -> None:
        """Raises if no worker answers in time."""
        ...

    async def run(self, request: Request, ranked: tuple[str, ...]) -> None:
        """Have a worker run a request, of `ranked` the first that takes it. Lasts as long as the request; cancelling

        it ends the request. Its tokens come over the sessions.

        Raises:
            WorkerFullError: the worker has too much to do.
            WorkerStoppingError: the worker takes no requests.
            WorkerLostError: the worker died, or nobody knows.
            PagodaError: no worker would serve it, or there is none.
        """
        ...


class _Live:
    """A request that has not ended."""

    def __init__(self, progress: RequestProgress) -> None:
        self.progress = progress
        self.is_aborted = False
        self.num_failures = 0
        """In a row, since anything was heard of it."""
        self.attempt_id: RequestId | None = None
        """While a worker runs it or may."""
        self.outputs: PendingOutputs | None = None

    def check_not_aborted(self) -> None:
        if self.is_aborted:
            raise RequestAbortedError("the request was aborted")


class ResumingClient:
    """Implements `WorkerClient`. One event loop."""

    def __init__(
        self,
        calls: WorkerCalls,
        sessions: WorkerSessions,
        limits: EngineLimits,
        placer: Placer | None = None,
        *,
        on_lost: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`limits` are the workers'. Without a `placer`, `calls` choose by load alone.

        `on_lost` hears each time that a request loses its worker whether it goes on (True) or is given up.
        """
        self._on_lost = on_lost
        self._limits = limits
        self._calls = calls
        self._sessions = sessions
        self._placer = placer
        self._live: dict[RequestId, _Live] = {}

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    async def ping(self) -> None:
        await self._calls.ping()

    async def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        if request.sampling.seed is None:  # whoever goes on with it must draw the same numbers
            seed = secrets.randbelow(MAX_SEED + 1)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        begin_s = asyncio.get_running_loop().time()
        progress = RequestProgress(request, self._limits)
        live = self._live[request.request_id] = _Live(progress)
        avoided: set[str] = set()
        try:
            while not progress.has_ended:
                live.check_not_aborted()
                attempt = _with_what_is_left(progress.attempt(), begin_s)
                ranked = () if self._placer is None else await self._placer.rank(attempt, exclude=avoided)
                try:
                    async with contextlib.aclosing(self._try(attempt, ranked, live)) as batches:
                        async for batch in batches:
                            live.num_failures = 0
                            yield batch
                    return
                except WorkerLostError as error:
                    self._go_on(live, attempt, error)
                except (OverloadedError, WorkerStoppingError) as error:
                    progress.refuse(error)
                    live.num_failures += 1
                    is_final = live.num_failures >= MAX_TRIES or not isinstance(error, _OTHERS_MAY_TAKE_IT)
                    if is_final and not progress.is_accepted:
                        raise
                finally:
                    if self._placer is not None:
                        self._placer.gone(attempt.request_id)
                avoided.update(ranked[:1])
                await asyncio.sleep(min(_PAUSE_S[0] * 1.5 ** (live.num_failures - 1), _PAUSE_S[1]))
                if live.num_failures % MAX_TRIES == 0:
                    avoided.clear()  # those that had no room may have some by now
        finally:
            del self._live[request.request_id]

    def _go_on(self, live: _Live, attempt: Request, error: WorkerLostError) -> None:
        """A worker is lost. Raises what ends the request if it is not tried again."""
        live.num_failures += 1
        try:
            live.progress.lose_worker(error)
            if live.num_failures >= MAX_FAILURES:
                raise error
        except PagodaError:
            logger.warning("request %s is given up: %s", attempt.request_id, error)
            self._on_lost(False)
            raise
        logger.info("request %s goes on at another worker: %s", attempt.request_id, error)
        self._on_lost(True)

    def abort(self, request_id: RequestId) -> None:
        """End it on its worker, whichever ingress it came through; if it came through this one, also here."""
        live = self._live.get(request_id)
        if live is None:
            self._sessions.abort_everywhere(request_id)
            return
        live.is_aborted = True
        if live.attempt_id is not None:
            self._sessions.abort_everywhere(live.attempt_id)
        if live.outputs is not None:
            live.outputs.fail(RequestAbortedError("the request was aborted"))

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        if (live := self._live.get(request_id)) is not None:
            live.progress.complete_sample(index)
            if live.attempt_id is not None:
                self._sessions.complete_sample(live.attempt_id, index)

    async def scrape(self) -> list[str | None]:
        return await self._sessions.scrape()

    async def _try(
        self, attempt: Request, ranked: tuple[str, ...], live: _Live
    ) -> AsyncGenerator[list[SequenceOutput], None]:
        """What one worker brings. Raises `WorkerLostError` once it brings no more before the end."""
        # Registered before the call, so that no token comes too early.
        outputs = live.outputs = self._sessions.open(attempt.request_id)
        live.attempt_id = attempt.request_id
        # In a context of its own: calls made within one HTTP request would have one id in Serve, and a router without
        # FIFO order tells pending calls apart by that.
        call = asyncio.create_task(self._carry(attempt, ranked), context=contextvars.Context())
        call.add_done_callback(outputs.end_with)
        is_begun = False
        try:
            async for batch in outputs.until_ended(len(attempt.live_samples)):
                if not is_begun and self._placer is not None:
                    self._placer.begun(attempt.request_id)
                is_begun = True
                if news := live.progress.take(batch):
                    yield news
                if (failure := live.progress.failure) is not None:
                    raise WorkerLostError(failure)
        finally:
            call.cancel()
            live.attempt_id = live.outputs = None
            if not outputs.is_ended:  # the cancellation of the call may not reach the worker
                self._sessions.abort_everywhere(attempt.request_id)
            self._sessions.close(attempt.request_id)

    async def _carry(self, attempt: Request, ranked: tuple[str, ...]) -> None:
        """The call, and a while for its last tokens, which take another way; cancelled as soon as they are there.

        Raises as `WorkerCalls.run` does, and `WorkerLostError` if they do not come: the worker has sent them over a
        session that is given up here, and has not noticed yet.
        """
        await self._calls.run(attempt, ranked)
        await asyncio.sleep(LAST_TOKENS_S)
        raise WorkerLostError("the worker has ended the request, and its last tokens do not come")


def _with_what_is_left(attempt: Request, begin_s: float) -> Request:
    """Of the time that the request had when it began."""
    waited_s = asyncio.get_running_loop().time() - begin_s
    timeout_s = None if attempt.timeout_s is None else attempt.timeout_s - waited_s
    return replace(attempt, timeout_s=timeout_s, waited_s=waited_s)
