"""What a worker measures, with a clock that the test moves; and that it moves at all in a real engine."""

from collections import deque
from typing import Any

import pytest
from fakes import FakeExecutor, Replica
from prometheus_client.parser import text_string_to_metric_families

from pagoda.worker.instruments import Definition, Instruments, merge_expositions
from pagoda.worker.metrics import DEFINITIONS, WorkerMetrics
from pagoda.worker.prefix_lookup import MissReason
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.types import (
    FinishReason,
    NewSequence,
    Request,
    RequestId,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
)

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


def samples(exposition: str) -> dict[tuple[str, ...], float]:
    """(name, label values but the worker's, ...) -> value."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "worker"]
            found[sample.name.removeprefix("pagoda_"), *labels] = sample.value
    return found


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """Metrics with a clock, told by hand what an engine would tell them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = WorkerMetrics(worker="w", clock=self.clock)

    def arrive(self, name: str, *, num_tokens: int = 5, n: int = 1) -> None:
        with self.metrics.arrival(Request(RequestId(name), tuple(range(num_tokens)), SamplingParams(n=n))):
            pass

    def step(self, *, new: tuple[str, ...] = (), tokens: int = 1, after: float, outputs: list[SequenceOutput]) -> None:
        """A step of one sequence that takes `after` seconds."""
        plan = SchedulerOutput(1, new=[self._new(sequence_id) for sequence_id in new])
        plan.num_scheduled_tokens = {SequenceId("a/0"): tokens}
        begin = self.clock.now
        self.metrics.step_begins(plan, begin)
        self.clock.now += after
        self.metrics.step_ends(plan, after)
        self.metrics.take_outputs(outputs)

    def samples(self) -> dict[tuple[str, ...], float]:
        return samples(self.metrics.exposition(SchedulerStats()))

    def sum_and_count(self, name: str, *labels: str) -> tuple[float, float]:
        found = self.samples()
        return found[f"{name}_sum", *labels], found[f"{name}_count", *labels]

    @staticmethod
    def _new(sequence_id: str) -> NewSequence:
        return NewSequence(SequenceId(sequence_id), (1,), 0, 0, 0, ((0,),), SamplingParams(), 0, frozenset(), 0)


def out(name: str, index: int = 0, reason: FinishReason | None = None, *, tokens: int = 1) -> SequenceOutput:
    return SequenceOutput(RequestId(name), index, tuple(range(tokens)), reason)


# -- intervals -----------------------------------------------------------------------------------


def test_intervals_of_one_request() -> None:
    """It waits 2 s, computes its prompt in 3 s, and gets two more tokens after 1 s and 4 s."""
    worker = Worker()
    worker.arrive("a")
    worker.clock.now += 2
    worker.step(new=("a/0",), tokens=5, after=3, outputs=[out("a")])
    worker.step(after=1, outputs=[out("a")])
    worker.step(after=4, outputs=[out("a", reason=LENGTH)])
    assert worker.sum_and_count("request_queue_time_seconds") == (2, 1)
    assert worker.sum_and_count("request_prefill_time_seconds") == (3, 1)
    assert worker.sum_and_count("time_to_first_token_seconds") == (5, 1)
    assert worker.sum_and_count("inter_token_latency_seconds") == (5, 2)
    assert worker.sum_and_count("request_decode_time_seconds") == (5, 1)
    assert worker.sum_and_count("e2e_request_latency_seconds") == (10, 1)
    assert worker.sum_and_count("step_time_seconds", "prefill") == (3, 1)
    assert worker.sum_and_count("step_time_seconds", "decode") == (5, 2)
    found = worker.samples()
    assert found["prompt_tokens_total",] == 5
    assert found["generation_tokens_total",] == 3
    assert found["request_success_total", "length"] == 1


def test_sequences_of_one_step_are_observed_one_by_one() -> None:
    """They are written together, which must not show."""
    worker = Worker()
    for name in "ab":
        worker.arrive(name)
    worker.step(new=("a/0",), after=1, outputs=[out("a")])
    worker.step(new=("b/0",), after=2, outputs=[out("a"), out("b")])
    worker.step(after=4, outputs=[out("a"), out("b")])
    assert worker.sum_and_count("inter_token_latency_seconds") == (2 + 4 + 4, 3)
    assert worker.sum_and_count("time_to_first_token_seconds") == (1 + 3, 2)
    assert worker.samples()["inter_token_latency_seconds_bucket", "2.5"] == 1


def test_samples_are_sequences_of_one_prompt() -> None:
    worker = Worker()
    worker.arrive("a", n=2, num_tokens=7)
    worker.step(new=("a/0",), after=1, outputs=[out("a", 0)])
    worker.step(new=("a/1",), after=1, outputs=[out("a", 0, STOP), out("a", 1)])
    worker.step(after=1, outputs=[out("a", 1, LENGTH)])
    found = worker.samples()
    assert found["prompt_tokens_total",] == 7
    assert (found["request_success_total", "stop"], found["request_success_total", "length"]) == (1, 1)
    assert worker.sum_and_count("time_to_first_token_seconds") == (1 + 2, 2)
    assert not worker.metrics._live


def test_preempted_sequence_starts_once() -> None:
    worker = Worker()
    worker.arrive("a")
    worker.step(new=("a/0",), after=1, outputs=[out("a")])
    worker.step(new=("a/0",), after=8, outputs=[out("a", reason=LENGTH)])
    assert worker.sum_and_count("request_queue_time_seconds") == (0, 1)
    assert worker.sum_and_count("inter_token_latency_seconds") == (8, 1)
    assert worker.samples()["prompt_tokens_total",] == 5


@pytest.mark.parametrize("reason", [ABORT, ERROR])
def test_end_before_the_first_step(reason: FinishReason) -> None:
    """It has an end, and none of the intervals that it never came to."""
    worker = Worker()
    worker.arrive("a")
    worker.clock.now += 3
    worker.metrics.take_outputs([out("a", reason=reason, tokens=0)])
    assert worker.sum_and_count("e2e_request_latency_seconds") == (3, 1)
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token"):
        assert worker.sum_and_count(f"{name}_seconds") == (0, 0)
    assert worker.samples()["request_success_total", reason.value] == 1
    assert not worker.metrics._live


def test_refused_request_leaves_nothing() -> None:
    worker = Worker()
    request = Request(RequestId("a"), (1,), SamplingParams())
    with pytest.raises(ValueError, match="refused"), worker.metrics.arrival(request):
        raise ValueError("refused")
    assert not worker.metrics._live


def test_second_request_of_an_id_does_not_harm_the_first() -> None:
    """The engine refuses it while the first one runs."""
    worker = Worker()
    worker.arrive("a")
    worker.clock.now += 1
    with (
        pytest.raises(ValueError, match="in use"),
        worker.metrics.arrival(Request(RequestId("a"), (1,), SamplingParams())),
    ):
        raise ValueError("in use")
    worker.step(new=("a/0",), after=1, outputs=[out("a", reason=STOP)])
    assert worker.sum_and_count("e2e_request_latency_seconds") == (2, 1)


def test_executor_is_measured_and_does_what_it_did() -> None:
    """A failed step has no duration; an empty one is no step."""
    clock = Clock()
    metrics = WorkerMetrics(worker="w", clock=clock)
    rank = FakeExecutor(block_size=1)
    rank.failures = deque([None, None, RuntimeError("broken")])
    executor = metrics.measured(rank)
    plan = SchedulerOutput(1, new=[Worker._new("a/0")], num_scheduled_tokens={SequenceId("a/0"): 1})
    assert executor.execute(plan).sampled.keys() == {"a/0"}
    assert executor.execute(SchedulerOutput(2)).sampled == {}
    with pytest.raises(RuntimeError, match="broken"):
        executor.execute(SchedulerOutput(3, num_scheduled_tokens={SequenceId("a/0"): 1}))
    found = samples(metrics.exposition(SchedulerStats()))
    assert (found["step_time_seconds_count", "prefill"], found["step_time_seconds_count", "decode"]) == (1, 0)
    executor.shutdown()
    assert rank.num_shutdowns == 1


# -- the scheduler's counts ----------------------------------------------------------------------


def exposed(replica: Replica) -> dict[tuple[str, ...], float]:
    return samples(WorkerMetrics(worker="w").exposition(replica.stats))


def misses(replica: Replica) -> dict[str, float]:
    return {key[1]: value for key, value in exposed(replica).items() if key[0] == "cache_miss_total" and value}


def test_gauges_show_what_is_there() -> None:
    replica = Replica(num_blocks=10, max_num_seqs=1)
    replica.add("a", range(8), max_tokens=10)
    replica.add("b", range(8), max_tokens=10)
    replica.step()
    found = exposed(replica)
    assert (found["num_requests_running",], found["num_requests_waiting",]) == (1, 1)
    assert found["kv_cache_usage_ratio",] == 0.2
    replica.run()
    found = exposed(replica)
    assert (found["num_requests_running",], found["num_requests_waiting",]) == (0, 0)
    assert found["kv_cache_usage_ratio",] == 0.0


def test_preemptions_count() -> None:
    replica = Replica(num_blocks=8)
    for name in "abcd":
        replica.add(name, range(5), max_tokens=20)
    replica.run()
    assert exposed(replica)["num_preemptions_total",] == replica.stats.num_preemptions > 0


def test_misses_by_reason() -> None:
    """Blocks of 4 tokens, and a pool of 8: the second prompt drives out part of the first."""
    replica = Replica(num_blocks=8)
    replica.add("first", range(10), max_tokens=1)
    replica.run()
    assert misses(replica) == {"never_seen": 8, "open_block": 2}
    replica.add("again", range(10), max_tokens=1)
    replica.run()
    assert misses(replica) == {"never_seen": 8, "open_block": 4}
    assert exposed(replica)["prefix_cache_hits_total",] == 8
    replica.add("other", range(20, 48), max_tokens=1)
    replica.run()
    assert misses(replica) == {"never_seen": 8 + 28, "open_block": 4}
    replica.add("first again", range(10), max_tokens=1)
    replica.run()
    found = misses(replica)
    assert found["evicted"] in {4, 8}
    assert found["never_seen"] == 8 + 28


def test_last_token_of_a_prompt_found_whole_is_an_open_one() -> None:
    replica = Replica()
    for name in ("first", "again"):
        replica.add(name, range(8), max_tokens=1)
        replica.run()
    assert misses(replica) == {"never_seen": 8, "open_block": 1}
    assert exposed(replica)["prefix_cache_hits_total",] == 7


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": False}, {}])
def test_requests_that_may_not_use_the_cache(settings: dict[str, Any]) -> None:
    replica = Replica(**settings)
    for name in ("first", "again"):
        replica.add(name, range(8), max_tokens=1, salt=b"" if settings else None)
        replica.run()
    assert misses(replica) == {"not_eligible": 16}


def test_samples_look_up_once() -> None:
    """What they share among themselves was not in the cache."""
    replica = Replica()
    replica.add("a", range(8), max_tokens=2, n=3)
    replica.run()
    assert exposed(replica)["prefix_cache_queries_total",] == 8
    assert exposed(replica)["prefix_cache_hits_total",] == 0


def test_every_token_looked_up_is_a_hit_or_a_miss() -> None:
    """Also with preemption, eviction, aborts and several groups of layers."""
    replica = Replica(num_blocks=24, windows=(0, 0))
    for number in range(40):
        replica.add(str(number), range(number % 7, number % 7 + 3 + number % 11), max_tokens=6, n=1 + number % 2)
        if number % 5 == 0:
            replica.abort(str(number - 1)) if number else None
        replica.step()
    replica.run()
    stats = replica.stats
    assert stats.num_hit_tokens + sum(stats.num_missed_tokens.values()) == stats.num_queried_tokens
    assert stats.num_preemptions
    assert stats.num_missed_tokens[MissReason.EVICTED]


# -- definitions and text ------------------------------------------------------------------------


def test_every_definition_is_exposed_once_from_the_start() -> None:
    """A series that appears with its first event would hide that event from `rate()`."""
    families = list(text_string_to_metric_families(WorkerMetrics(worker="w").exposition(SchedulerStats())))
    exposed_names = [f"{family.name}{'_total' if family.type == 'counter' else ''}" for family in families]
    assert sorted(exposed_names) == sorted(definition.name for definition in DEFINITIONS)
    assert all(family.samples for family in families)
    assert all(sample.labels["worker"] == "w" for family in families for sample in family.samples)
    by_name = {definition.name: definition for definition in DEFINITIONS}
    for name, family in zip(exposed_names, families, strict=True):
        assert (family.type, family.documentation) == (by_name[name].kind, by_name[name].help)


def test_merged_expositions_are_one_valid_exposition() -> None:
    """HELP and TYPE once for each metric, all its series together, and nothing lost."""
    texts = [WorkerMetrics(worker=name).exposition(SchedulerStats(num_running=i)) for i, name in enumerate("abc")]
    other = Instruments({"ingress": "x"})
    other.value(Definition("pagoda_http_requests_total", "counter", 'A "quoted" \\ help.', ("path",))).add(
        labels=('a"\n',)
    )
    merged = merge_expositions([other.exposition(), *texts])
    assert all(merged.count(f"# {kind} {d.name} ") == 1 for d in DEFINITIONS for kind in ("HELP", "TYPE"))
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert {s.labels["worker"]: s.value for s in families["pagoda_num_requests_running"].samples} == {
        "a": 0,
        "b": 1,
        "c": 2,
    }
    assert families["pagoda_http_requests"].samples[0].labels == {"ingress": "x", "path": 'a"\n'}
    lines = [line for text in (other.exposition(), *texts) for line in text.splitlines() if not line.startswith("#")]
    assert sorted(line for line in merged.splitlines() if not line.startswith("#")) == sorted(lines)


def test_merging_nothing() -> None:
    assert merge_expositions([]) == ""


def test_histogram_buckets_are_cumulative_and_bounds_inclusive() -> None:
    instruments = Instruments({})
    histogram = instruments.histogram(Definition("pagoda_x_seconds", "histogram", "X.", buckets=(0.5, 1)))
    for number in (0.0, 0.5, 1.0, 1.5, 99.0):
        histogram.observe(number)
    found = samples(instruments.exposition())
    buckets = [found["x_seconds_bucket", bound] for bound in ("0.5", "1.0", "+Inf")]
    assert buckets == [2, 3, 5]
    assert (found["x_seconds_count",], found["x_seconds_sum",]) == (5, 102)
