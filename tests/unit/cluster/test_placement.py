"""Costs in seconds, and what they make of the cases that went wrong elsewhere."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.cluster.placement import (
    Candidate,
    PlacementReason,
    Prompt,
    WorkerLoad,
    WorkerRates,
    cost_of,
    place,
)

BLOCK = 16
RATES = WorkerRates(
    prefill_s_per_token=1e-3,
    prefill_s_per_token_and_context=1e-7,
    step_base_s=4e-3,
    step_s_per_sequence=1e-3,
    released_blocks_per_s=100.0,
    restore_s_per_token=1e-4,
    mean_output_tokens=50,
)
LOAD = WorkerLoad(max_num_seqs=8, num_free_blocks=1000, num_empty_blocks=1000, num_blocks=1000)
PROMPT = Prompt(num_tokens=1000, block_size=BLOCK)


def worker(name: str, *, cached: int = 0, lower: int = 0, rates: WorkerRates = RATES, **load: Any) -> Candidate:
    return Candidate(name, replace(LOAD, **load), rates, cached, lower)


def first(*candidates: Candidate, prompt: Prompt = PROMPT, seed: int = 0) -> str:
    placement = place(prompt, candidates, random.Random(seed).random)
    assert placement is not None
    assert sorted(placement.ranked) == sorted(candidate.worker_id for candidate in candidates)
    return placement.ranked[0]


@given(
    st.integers(0, 60), st.integers(0, 20_000), st.integers(0, 200), st.integers(1, 900),
    st.sampled_from(["num_sequences", "num_uncached_tokens", "num_uncached_pairs"]), st.integers(1, 10_000),
)  # fmt: skip
def test_more_to_do_never_makes_a_worker_cheaper(
    cached: int, num_tokens: int, num_sequences: int, num_free: int, name: str, more: int
) -> None:
    load = {
        "num_uncached_tokens": num_tokens,
        "num_uncached_pairs": num_tokens * 100,
        "num_sequences": num_sequences,
        "num_free_blocks": num_free,
        "num_empty_blocks": num_free // 2,
    }
    before = cost_of(PROMPT, worker("a", cached=cached, **load)).total_s
    assert cost_of(PROMPT, worker("a", cached=cached, **load | {name: load[name] + more})).total_s >= before


def test_a_short_answer_does_not_wait_for_long_ones() -> None:
    """Scenario: all samples of one large request wait on a worker; its prefix is there, but who comes waits for them.

    How long it waits depends on their length, and on what a step takes even if it grows with none of them.
    """
    rates = replace(RATES, step_base_s=20e-3, step_s_per_sequence=0.0)
    full = worker("full", cached=60, rates=rates, num_sequences=128)
    assert first(full, worker("idle", rates=rates), prompt=replace(PROMPT, max_output_tokens=1)) == "idle"
    assert cost_of(replace(PROMPT, max_output_tokens=1), full).queue_s == pytest.approx(121 * 50 * 20e-3 / 8)


def test_each_term() -> None:
    """By hand."""
    busy = worker(
        "a", cached=30, lower=10, rates=replace(RATES, evicted_hit_ratio=0.5),
        num_uncached_tokens=200, num_uncached_pairs=20_000, num_sequences=8, num_free_blocks=20, num_empty_blocks=5,
    )  # fmt: skip
    cost = cost_of(PROMPT, busy)
    assert cost.queue_s == pytest.approx(200 * 1e-3 + 1e-7 * 20_000 + 1 * 50 * (4e-3 / 8 + 1e-3))
    assert cost.restore_s == pytest.approx(10 * BLOCK * 1e-4)
    assert cost.prefill_s == pytest.approx(520 * 1e-3 + 1e-7 * 520 * (480 + 260))
    assert cost.block_wait_s == pytest.approx((62 - 30 + 1 - 20) / 100)
    assert cost.decode_penalty_s == pytest.approx(8 * 50 * 1e-3)
    evicted = (33 - 5) * BLOCK
    assert cost.eviction_s == pytest.approx(0.5 * (evicted * 1e-3 + 1e-7 * evicted * evicted / 2))
    assert cost.crowding_s == 0.0
    assert cost.total_s == pytest.approx(max(cost.queue_s, cost.restore_s) + sum(cost[2:]))


def test_one_token_is_always_computed() -> None:
    placement = place(Prompt(32, BLOCK), [worker("a", cached=2)], random.random)
    assert placement is not None
    assert (placement.num_cached_tokens, placement.num_uncached_tokens) == (31, 1)
    assert placement.reason is PlacementReason.ONLY


def test_nobody_there() -> None:
    assert place(PROMPT, [], random.random) is None


def test_a_prefix_is_worth_what_it_saves() -> None:
    assert first(worker("empty"), worker("holder", cached=40)) == "holder"


def test_a_miss_goes_to_the_least_loaded_and_not_to_the_smallest_cache() -> None:
    """Scenario: sglang #14305. The worker with the fewest entries is the one that never gets to keep any."""
    small = worker("small", num_uncached_tokens=5000, num_empty_blocks=1000)
    large = worker("large", num_uncached_tokens=100, num_empty_blocks=0)
    assert first(small, large) == "large"


def test_the_first_holder_does_not_win_however_busy() -> None:
    """Scenario: production-stack #1035."""
    holder = worker("holder", cached=60, num_uncached_tokens=8000)
    placement = place(PROMPT, [holder, worker("idle")], random.random)
    assert placement is not None
    assert placement.ranked == ("idle", "holder")
    assert placement.reason is PlacementReason.SPREAD


def test_one_hot_worker_does_not_switch_affinity_off() -> None:
    """Scenario: sglang #32195. Others still get what they hold."""
    hot = worker("hot", num_uncached_tokens=50_000)
    assert first(hot, worker("b", cached=40), worker("c")) == "b"


def test_as_good_as_equal() -> None:
    """More of the prompt, then fewer blocks in use, then chance: not always the first one."""
    slightly_faster = replace(RATES, prefill_s_per_token=0.995e-3)
    assert first(worker("a", rates=slightly_faster), worker("b", cached=1)) == "b"
    assert first(worker("a", num_free_blocks=900), worker("b")) == "b"
    winners = {first(worker("a", rates=slightly_faster), worker("b"), worker("c"), seed=seed) for seed in range(30)}
    assert winners == {"a", "b", "c"}


def test_what_would_be_pushed_out_counts_where_it_is_asked_for_again() -> None:
    """Else whoever holds the common beginning gets everybody, and forgets them, while other caches are empty."""
    rates = replace(RATES, evicted_hit_ratio=1.0)
    full = worker("full", cached=5, rates=rates, num_empty_blocks=0)
    assert first(full, worker("empty", rates=rates)) == "empty"
    forgettable = worker("full", cached=5, num_empty_blocks=0)
    assert first(forgettable, worker("empty")) == "full"


def test_where_there_is_much_to_do_nothing_is_computed_twice_lightly() -> None:
    """The holder has a little to do; computing it all again elsewhere takes less, and takes it from others."""
    holder = worker("holder", cached=50, num_uncached_tokens=1000)
    assert first(holder, worker("idle")) == "idle"
    rates = replace(RATES, busy_ratio=0.4)
    holder = worker("holder", cached=50, num_uncached_tokens=1000, rates=rates)
    assert first(holder, worker("idle", rates=rates)) == "holder"
    busiest = cost_of(PROMPT, worker("a", rates=replace(RATES, busy_ratio=1.0)))
    assert busiest.crowding_s == pytest.approx(busiest.prefill_s)


def test_a_busy_holder_among_idle_workers() -> None:
    """What it is busy with is its own queue; nobody would miss what is computed again elsewhere."""
    rates = replace(RATES, busy_ratio=1.0)
    holder = worker("holder", cached=50, num_uncached_tokens=1000, rates=rates)
    idle = [worker(f"idle{number}") for number in range(7)]
    assert first(holder, *idle) != "holder"


def test_restoring_overlaps_with_waiting() -> None:
    waiting = cost_of(PROMPT, worker("a", cached=60, lower=60, num_uncached_tokens=500))
    assert waiting.restore_s < waiting.queue_s
    assert waiting.total_s == pytest.approx(cost_of(PROMPT, worker("a", cached=60, num_uncached_tokens=500)).total_s)


def test_no_blocks_and_no_rate() -> None:
    """A worker that has never released a block is not for free."""
    rates = replace(RATES, released_blocks_per_s=0.0)
    assert first(worker("full", rates=rates, num_free_blocks=0, num_blocks=10), worker("free", rates=rates)) == "free"


def test_reasons() -> None:
    def reason(*candidates: Candidate) -> PlacementReason:
        placement = place(PROMPT, candidates, random.random)
        assert placement is not None
        return placement.reason

    assert reason(worker("a"), worker("b")) is PlacementReason.LOAD
    assert reason(worker("a", cached=3), worker("b")) is PlacementReason.PREFIX


def test_simultaneous_requests_see_each_other() -> None:
    """Each placed one is in the load of the next: nobody gets all of them."""
    waiting = dict.fromkeys("abcd", 0)
    for number in range(40):
        candidates = [worker(name, num_uncached_tokens=tokens) for name, tokens in waiting.items()]
        waiting[first(*candidates, seed=number)] += 1000
    assert set(waiting.values()) == {10_000}
