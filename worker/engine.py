"""The engine: one thread that owns scheduler and KV state, and turns requests into tokens.

    add, abort, drain (any thread)  -->  inbox  -->  engine thread: step, step, ...  -->  on_outputs(list)

`on_outputs` is called on the engine's thread, once per step, with everything that step brought; it must not block.
Every accepted sequence gets exactly one output with a `finish_reason`. Standard library only.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from pagoda.worker.block_hash import HashChain, HashDomain
from pagoda.worker.config import EngineLimits
from pagoda.worker.cost_model import StepCostModel
from pagoda.worker.deadlines import TimeLimits
from pagoda.worker.errors import (
    EngineStoppedError,
    IntegrityError,
    InvalidRequestError,
    OverloadedError,
    RankLostError,
)
from pagoda.worker.executor import Executor
from pagoda.worker.kv_layout import KVLayout
from pagoda.worker.load_report import LoadReporter
from pagoda.worker.pace import PaceMeter
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.types import (
    MAX_PROMPT_LOGPROBS,
    MAX_SEED,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SequenceOutput,
)

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine gives up."""
IDLE_CHECK_S = 0.5
"""Idle time after which the engine checks its bookkeeping, once."""
_JOIN_S = 30.0


def check_request(prompt_token_ids: Iterable[int], sampling: SamplingParams, limits: EngineLimits) -> None:
    """Raise `InvalidRequestError` if the engine would refuse this request, whatever its load.

    Anyone may call it before sending a request; the engine calls it again.
    """
    sampling.validate()
    prompt = tuple(prompt_token_ids)
    if not prompt:
        raise InvalidRequestError("prompt", "must hold at least one token")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise InvalidRequestError("prompt", f"token ids must be in [0, {limits.vocab_size})")
    if any(token >= limits.vocab_size for token in sampling.stop_token_ids):
        raise InvalidRequestError("stop_token_ids", f"token ids must be in [0, {limits.vocab_size})")
    if any(token >= limits.vocab_size for token in sampling.logit_bias):
        raise InvalidRequestError("logit_bias", f"token ids must be in [0, {limits.vocab_size})")
    if sampling.min_tokens and len(set(sampling.stop_token_ids)) >= limits.vocab_size:
        raise InvalidRequestError("stop_token_ids", "must leave tokens to choose from before min_tokens")
    room = limits.max_model_len - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            "prompt",
            f"is {len(prompt)} tokens long; prompt and output together may have {limits.max_model_len}",
        )
    for name in ("max_tokens", "min_tokens"):
        value = getattr(sampling, name)
        if value is not None and value > room:
            raise InvalidRequestError(
                name,
                f"{value} is too much: the prompt has {len(prompt)} of the {limits.max_model_len} tokens "
                f"that prompt and output together may have",
            )
    num_prompt_logprobs = 0 if sampling.prompt_logprobs is None else len(prompt) * (1 + sampling.prompt_logprobs)
    if num_prompt_logprobs > MAX_PROMPT_LOGPROBS:
        most = max(0, MAX_PROMPT_LOGPROBS // len(prompt) - 1)
        raise InvalidRequestError(
            "prompt_logprobs", f"of {len(prompt)} tokens, at most {most} alternatives are reported"
        )
    room = limits.max_num_seqs + limits.max_num_waiting
    if sampling.n > room:
        raise InvalidRequestError("n", f"at most {room} samples can ever run or wait here")


def check_progress(request: Request, limits: EngineLimits) -> None:
    """Raise `InvalidRequestError` unless a checked request can go on from where it says it stands."""
    if not request.progress:
        return
    if len(request.progress) != request.sampling.n:
        raise InvalidRequestError("progress", f"must be of {request.sampling.n} samples, got {len(request.progress)}")
    if not request.live_samples:
        raise InvalidRequestError("progress", "all samples have ended")
    room = limits.max_model_len - len(request.prompt_token_ids)
    most = min(room, request.sampling.max_tokens or room)
    for index in request.live_samples:
        token_ids = request.progress_of(index).token_ids
        if len(token_ids) >= most:
            raise InvalidRequestError("progress", f"sample {index} has all its {most} tokens")
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
            raise InvalidRequestError("progress", f"token ids must be in [0, {limits.vocab_size})")


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    seed: int
    hash_chain: HashChain | None
    limits: TimeLimits


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId
    index: int | None
    reason: FinishReason


class Engine:
    """Owns a scheduler and an executor. Start it, add requests, shut it down; it starts only once."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        hash_domain: HashDomain,
        *,
        layout: KVLayout,
        on_outputs: Callable[[list[SequenceOutput]], None],
        reporter: LoadReporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout` is the first rank's. `reporter`, if there is one, is told of every step."""
        self.layout = layout
        self._reporter = reporter
        self._clock = clock
        self._costs = StepCostModel() if reporter is None else reporter.costs
        self._pace = PaceMeter(self._costs, clock())
        self.limits = scheduler.limits
        self._scheduler = scheduler
        self._executor = executor
        self._hash_domain = hash_domain
        self._on_outputs = on_outputs
        self._wake = threading.Condition()
        """Guards the fields below, which any thread may touch."""
        self._inbox: deque[_Add | _Abort] = deque()
        self._live: dict[RequestId, set[int]] = {}
        """Accepted requests and which of their samples have not ended."""
        self._num_live_sequences = 0
        self._accepting = True
        self._stopping = False
        self._loss: RankLostError | None = None
        self._failure: BaseException | None = None
        self._num_failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def hash_domain(self) -> HashDomain:
        """What the hashes of this engine's blocks begin with, but for salts and adapters."""
        return self._hash_domain

    @property
    def announced_windows(self) -> tuple[int, ...]:
        """For each kind of layers that events speak of, blocks before a boundary that it needs; 0 is all of them."""
        return self._scheduler.manager.announced_windows

    @property
    def num_token_blocks(self) -> int:
        """Blocks of tokens that the pool holds if every group of layers holds every token."""
        return self._scheduler.manager.pool.num_blocks // self._scheduler.manager.num_groups

    @property
    def failure(self) -> BaseException | None:
        """Why the engine died, if it did. A dead engine has ended all its requests and takes none."""
        return self._failure

    def stats(self) -> SchedulerStats:
        """Counters as of the last step."""
        return self._scheduler.snapshot()

    def add(self, request: Request) -> None:
        """Accept a request; its outputs go to `on_outputs`.

        Its time begins now. If too many sequences wait, some end as shed soon after, this one's perhaps.

        Raises:
            InvalidRequestError: the request can never be served.
            OverloadedError: so many came at once that the engine has not even looked at them.
            EngineStoppedError: the engine drains, was shut down or died.
        """
        check_request(request.prompt_token_ids, request.sampling, self.limits)
        if not 0 <= request.num_public_tokens <= len(request.prompt_token_ids):
            raise InvalidRequestError("num_public_tokens", f"{request.num_public_tokens} is not within the prompt")
        check_progress(request, self.limits)
        live = set(request.live_samples)
        seed = request.sampling.seed
        chain: HashChain | None = self._hash_domain.chain(request.salt, num_public_tokens=request.num_public_tokens)
        if request.sampling.prompt_logprobs is not None:
            chain = None  # a token found in the cache is not computed, so nothing could tell its log probability
        with self._wake:
            if not self._accepting:
                raise EngineStoppedError("the engine takes no requests any more")
            if request.request_id in self._live:
                raise InvalidRequestError("request_id", f"{request.request_id} is in use")
            # Who goes when the queue is full is for the engine to say; what it has yet to look at has a bound too.
            room = self.limits.max_num_seqs + 2 * self.limits.max_num_waiting - self._num_live_sequences
            # What another worker has taken before it died is the cluster's to finish.
            if len(live) > room and not request.progress:
                raise OverloadedError(
                    f"{self._num_live_sequences} sequences run or wait already", retry_after_s=self.wait_s()
                )
            limits = self._time_limits(request)
            self._live[request.request_id] = live
            self._num_live_sequences += len(live)
            seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
            self._inbox.append(_Add(request, seed, chain, limits))
            self._wake.notify_all()

    def wait_s(self) -> float | None:
        """In about so many seconds those who wait now have begun, and others may come; None if that is unknown."""
        return self._pace.wait_s(self._scheduler.num_waiting)

    def abort(self, request_id: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one of its samples, with a last output of `reason`; unknown ids are ignored.

        Reason `stop` is for readers that have found the end themselves, as of a stop string.
        """
        with self._wake:
            if request_id in self._live:
                self._inbox.append(_Abort(request_id, index, reason))
                self._wake.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait until none is left. Returns whether that was reached in time."""
        with self._wake:
            self._accepting = False
            return self._wake.wait_for(lambda: not self._live, timeout_s)

    def shutdown(self) -> None:
        """End what is left with reason `abort` and stop the thread. May be called twice."""
        with self._wake:
            self._accepting = False
            self._stopping = True
            self._wake.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def abandon(self, error: RankLostError) -> None:
        """Die, soon: what computes is gone. From any thread, also while the engine is idle."""
        with self._wake:
            self._accepting = False
            self._loss = error
            self._wake.notify_all()

    # -- engine thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._scheduler.has_work():
                    self._step()
                self._report()
        except RankLostError as error:
            logger.error("the engine stops: %s", error)
            self._failure = error
        except Exception as error:
            logger.exception("the engine stops: its state cannot be trusted any more")
            self._failure = error
        finally:
            self._end_everything()
            self._executor.shutdown()

    def _report(self) -> None:
        """To whoever keeps account of us; what goes wrong there must not end requests."""
        if self._reporter is not None:
            try:
                self._reporter.report(self._scheduler)
            except Exception:
                logger.exception("no more reports")
                self._reporter = None

    def _take_commands(self) -> bool:
        """Apply what came in, waiting for it while there is nothing to do. False once the engine should stop."""
        if not self._scheduler.has_work() and not self._wait_for_command(IDLE_CHECK_S):
            # Idle is when a leak would show, and when looking for one delays nobody.
            self._scheduler.check_integrity()
            self._wait_for_command(None)
        with self._wake:
            if self._stopping:
                return False
            if self._loss is not None:
                raise self._loss
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            if isinstance(command, _Add):
                self._scheduler.add(
                    command.request, seed=command.seed, hash_chain=command.hash_chain, limits=command.limits
                )
                if self._reporter is not None:
                    self._reporter.admitted(command.request.request_id)
            else:
                self._emit(self._scheduler.abort(command.request_id, command.index, command.reason))
        self._emit(self._scheduler.shed_excess())
        now_s = self._clock()
        self._pace.measure(now_s, self._scheduler.stats.num_finished)
        self._emit(self._scheduler.expire(now_s, self._pace.pace))
        return True

    def _time_limits(self, request: Request) -> TimeLimits:
        now_s, max_wait_s = self._clock(), self._scheduler.config.max_wait_s
        return TimeLimits(
            begin_s=now_s,
            end_by_s=inf if request.timeout_s is None else now_s + request.timeout_s,
            first_token_by_s=inf if max_wait_s is None else now_s + max_wait_s - request.waited_s,
        )

    def _wait_for_command(self, timeout_s: float | None) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._inbox) or self._stopping or self._loss is not None, timeout_s)

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        self._emit(self._scheduler.begun_alone(plan))
        shape = self._scheduler.shape_of(plan)
        begin_s = self._clock()
        try:
            result = self._executor.execute(plan)
        except (IntegrityError, RankLostError):
            raise
        except Exception as error:
            logger.exception("step %d failed; its %d sequences end", plan.step, len(plan.num_scheduled_tokens))
            self._emit(self._scheduler.fail(plan, f"the step that computed it failed: {error}"))
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineStoppedError(f"{MAX_FAILED_STEPS} steps failed in a row") from error
            return
        self._num_failed_steps = 0
        if plan.num_scheduled_tokens:
            duration_s = self._clock() - begin_s
            self._pace.step_took(duration_s)
            if self._reporter is not None:
                self._reporter.step_took(shape, duration_s)
            else:
                self._costs.observe(shape, duration_s)
        self._emit(self._scheduler.update(plan, result))

    def _emit(self, outputs: list[SequenceOutput]) -> None:
        if not outputs:
            return
        self._on_outputs(outputs)
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended:
            with self._wake:
                for output in ended:
                    samples = self._live[output.request_id]
                    samples.remove(output.index)
                    self._num_live_sequences -= 1
                    if not samples:
                        del self._live[output.request_id]
                        if self._reporter is not None:
                            self._reporter.finished(output.request_id)
                self._wake.notify_all()

    def _end_everything(self) -> None:
        """The thread's last act: whatever was accepted ends, even if the scheduler's state cannot be trusted."""
        is_dead = self._failure is not None
        error = f"the engine died: {self._failure}" if is_dead else "the worker stopped"
        reason = FinishReason.ERROR if is_dead else FinishReason.ABORT
        with self._wake:
            self._accepting = False
            live = [(request_id, index) for request_id, samples in self._live.items() for index in sorted(samples)]
        try:
            self._emit([SequenceOutput(i, index, (), finish_reason=reason, error=error) for i, index in live])
        except Exception:
            logger.exception("nobody takes the ends of the last %d sequences", len(live))
