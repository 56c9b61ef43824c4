"""What a worker measures. Every metric of a worker is defined here, once; `docs/metrics.md` shows them all.

Nothing that decides or computes knows of this: it listens at the engine's interfaces.

    AsyncEngine.run  -- arrival ---------->  |          |
    executor         -- MeasuredExecutor ->  | Worker-  |  --> exposition (any thread)
    engine outputs   -- take_outputs ----->  | Metrics  |
    scheduler stats  -- when exposed ----->  |          |

Both ends of every interval are taken here, from one monotonic clock. A request for n samples is n sequences, each of
which has a time to its first token and an end of its own. What is written for every token is written for a whole step
at once: sequences that got their last token in the same step have waited equally long for the next one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pagoda.worker.executor import Executor
from pagoda.worker.instruments import PREFIX, Definition, Instruments
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.types import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestId,
    SchedulerOutput,
    SequenceOutput,
)

Clock = Callable[[], float]
"""Seconds since whenever, never backwards."""

_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8),
    *(1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)


def _counter(name: str, text: str, *labels: str) -> Definition:
    return Definition(f"{PREFIX}{name}_total", "counter", text, labels)


def _gauge(name: str, text: str) -> Definition:
    return Definition(PREFIX + name, "gauge", text)


def _seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Definition:
    return Definition(f"{PREFIX}{name}_seconds", "histogram", text, labels, buckets)


NUM_RUNNING = _gauge("num_requests_running", "Sequences that run.")
NUM_WAITING = _gauge("num_requests_waiting", "Sequences that wait for a place or for blocks.")
KV_CACHE_USAGE = _gauge("kv_cache_usage_ratio", "KV blocks that sequences hold, of all blocks.")
CACHE_QUERIES = _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
CACHE_HITS = _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
CACHE_MISSES = _counter("cache_miss", "Prompt tokens looked up and not found in the prefix cache, by reason.", "reason")
PREEMPTIONS = _counter("num_preemptions", "Sequences that gave up their blocks, to be computed again later.")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of requests that were started, cached ones included.")
GENERATION_TOKENS = _counter("generation_tokens", "Tokens generated.")
REQUESTS = _counter("request_success", "Sequences that ended, by the engine's reason.", "finished_reason")
FIRST_TOKEN = _seconds("time_to_first_token", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS)
INTER_TOKEN = _seconds("inter_token_latency", "Between two tokens of a sequence.", _TOKEN_BUCKETS)
LATENCY = _seconds("e2e_request_latency", "From arrival to the end, whatever the reason.", _REQUEST_BUCKETS)
QUEUE = _seconds("request_queue_time", "From arrival to the start of the first step.", _REQUEST_BUCKETS)
PREFILL = _seconds("request_prefill_time", "From the start of the first step to the first token.", _REQUEST_BUCKETS)
DECODE = _seconds("request_decode_time", "From the first token to the end.", _REQUEST_BUCKETS)
STEP = _seconds(
    "step_time", "Of one step; prefill: one that computes any prompt, decode: any other.", _TOKEN_BUCKETS, "kind"
)

DEFINITIONS = (
    *(NUM_RUNNING, NUM_WAITING, KV_CACHE_USAGE, CACHE_QUERIES, CACHE_HITS, CACHE_MISSES, PREEMPTIONS),
    *(PROMPT_TOKENS, GENERATION_TOKENS, REQUESTS, FIRST_TOKEN, INTER_TOKEN, LATENCY, QUEUE, PREFILL, DECODE, STEP),
)


class _Sequence:
    """When what happened to one sequence."""

    __slots__ = ("first_token_at", "last_token_at", "started_at")

    def __init__(self) -> None:
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0


class _Live:
    """A request whose samples have not all ended."""

    __slots__ = ("arrived_at", "num_left", "num_prompt_tokens", "sequences")

    def __init__(self, arrived_at: float, request: Request) -> None:
        self.arrived_at = arrived_at
        self.num_prompt_tokens: int = len(request.prompt_token_ids)
        """0 once they are counted."""
        self.num_left = len(request.live_samples)
        self.sequences = [_Sequence() for _ in range(request.sampling.n)]


class WorkerMetrics:
    """Measures one engine. The engine thread writes; arrivals and expositions may come from any other."""

    def __init__(self, *, worker: str, clock: Clock = time.monotonic) -> None:
        """`worker` is the label that tells this worker's series from others'."""
        self.clock = clock
        self._live: dict[RequestId, _Live] = {}
        self._instruments = instruments = Instruments({"worker": worker})
        self._num_running = instruments.value(NUM_RUNNING)
        self._num_waiting = instruments.value(NUM_WAITING)
        self._kv_cache_usage = instruments.value(KV_CACHE_USAGE)
        self._cache_queries = instruments.value(CACHE_QUERIES)
        self._cache_hits = instruments.value(CACHE_HITS)
        self._cache_misses = instruments.value(CACHE_MISSES)
        self._preemptions = instruments.value(PREEMPTIONS)
        self._prompt_tokens = instruments.value(PROMPT_TOKENS)
        self._generation_tokens = instruments.value(GENERATION_TOKENS)
        self._requests = instruments.value(REQUESTS, known=[(reason.value,) for reason in FinishReason])
        self._first_token = instruments.histogram(FIRST_TOKEN)
        self._inter_token = instruments.histogram(INTER_TOKEN)
        self._latency = instruments.histogram(LATENCY)
        self._queue = instruments.histogram(QUEUE)
        self._prefill = instruments.histogram(PREFILL)
        self._decode = instruments.histogram(DECODE)
        self._step = instruments.histograms(STEP, ("prefill", "decode"))

    @contextmanager
    def arrival(self, request: Request) -> Iterator[None]:
        """Within it the engine takes the request, or refuses it by raising."""
        if request.request_id in self._live:  # a second one of the same id, which is refused
            yield
            return
        self._live[request.request_id] = _Live(self.clock(), request)
        try:
            yield
        except BaseException:
            del self._live[request.request_id]
            raise

    def measured(self, executor: Executor) -> Executor:
        """An executor that does what `executor` does and tells us when."""
        return MeasuredExecutor(executor, self)

    def step_begins(self, plan: SchedulerOutput, now: float) -> None:
        for new in plan.new:
            request_id, _, index = new.sequence_id.rpartition("/")
            live = self._live.get(RequestId(request_id))
            if live is None or (sequence := live.sequences[int(index)]).started_at is not None:
                continue  # back from preemption
            sequence.started_at = now
            self._queue.observe(now - live.arrived_at)
            self._prompt_tokens.add(live.num_prompt_tokens)
            live.num_prompt_tokens = 0

    def step_ends(self, plan: SchedulerOutput, duration_s: float) -> None:
        """A step that computed something has succeeded. Decodes come first in a plan, so its last entry tells."""
        computes_prompt = plan.new or next(reversed(plan.num_scheduled_tokens.values())) > 1
        self._step["prefill" if computes_prompt else "decode"].observe(duration_s)

    def take_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        """What a step brought, or an abort."""
        now = self.clock()
        num_tokens = 0
        num_waited_since: dict[float, int] = {}
        for output in outputs:
            if (live := self._live.get(output.request_id)) is None:
                continue
            sequence = live.sequences[output.index]
            if output.token_ids:
                num_tokens += len(output.token_ids)
                if sequence.first_token_at is None:
                    sequence.first_token_at = now
                    self._first_token.observe(now - live.arrived_at)
                    if sequence.started_at is not None:
                        self._prefill.observe(now - sequence.started_at)
                else:
                    since = sequence.last_token_at
                    num_waited_since[since] = num_waited_since.get(since, 0) + 1
                sequence.last_token_at = now
            if output.finish_reason is not None:
                self._end(output.request_id, live, sequence, output.finish_reason, now)
        for since, count in num_waited_since.items():
            self._inter_token.observe(now - since, count)
        if num_tokens:
            self._generation_tokens.add(num_tokens)

    def exposition(self, stats: SchedulerStats) -> str:
        """All series in Prometheus' text format."""
        self._num_running.set(stats.num_running)
        self._num_waiting.set(stats.num_waiting)
        self._kv_cache_usage.set(stats.num_held_blocks / stats.num_blocks if stats.num_blocks else 0.0)
        self._cache_queries.set(stats.num_queried_tokens)
        self._cache_hits.set(stats.num_hit_tokens)
        for reason, num_tokens in stats.num_missed_tokens.items():
            self._cache_misses.set(num_tokens, labels=(reason.value,))
        self._preemptions.set(stats.num_preemptions)
        return self._instruments.exposition()

    def _end(self, request_id: RequestId, live: _Live, sequence: _Sequence, reason: FinishReason, now: float) -> None:
        self._requests.add(labels=(reason.value,))
        self._latency.observe(now - live.arrived_at)
        if sequence.first_token_at is not None:
            self._decode.observe(now - sequence.first_token_at)
        live.num_left -= 1
        if live.num_left == 0:
            del self._live[request_id]


class MeasuredExecutor:
    """Implements `Executor` over another one."""

    def __init__(self, executor: Executor, metrics: WorkerMetrics) -> None:
        self._executor = executor
        self._metrics = metrics

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        begin = self._metrics.clock()
        self._metrics.step_begins(plan, begin)
        result = self._executor.execute(plan)
        if plan.num_scheduled_tokens:
            self._metrics.step_ends(plan, self._metrics.clock() - begin)
        return result

    def shutdown(self) -> None:
        self._executor.shutdown()
