"""What an engine's steps say of how long a request needs, and how long those that wait will wait."""

import pytest

from pagoda.worker.cost_model import StepCostModel, StepShape
from pagoda.worker.deadlines import Pace, TimeLimits
from pagoda.worker.expected_outputs import ExpectedOutputs
from pagoda.worker.pace import PaceMeter


def test_nothing_measured_nothing_needed() -> None:
    meter = PaceMeter(StepCostModel(), 0.0)
    assert meter.pace.needed_s(1000, 0, 100.0) == 0
    assert meter.wait_s(10) is None


def test_prompts_and_outputs_take_what_steps_have_shown() -> None:
    """Ten milliseconds a step and a tenth of one for each prompt token."""
    costs = StepCostModel()
    meter = PaceMeter(costs, 0.0)
    for number in range(1, 200):
        num_tokens = number % 7 * 10
        duration_s = 0.01 + 0.0001 * num_tokens
        costs.observe(StepShape(num_tokens, 0.0, 4), duration_s)
        meter.step_took(duration_s)
    meter.measure(0.1, 0)
    assert meter.pace == Pace(), "not measured anew before half a second is over"
    meter.measure(1.0, 50)
    assert meter.pace.per_prefill_token_s == pytest.approx(0.0001, rel=0.05)
    assert meter.pace.step_s == pytest.approx(0.013, rel=0.2)
    assert meter.pace.needed_s(1000, 0, 10) == pytest.approx(0.1 + 10 * meter.pace.step_s, rel=0.05)
    assert meter.pace.needed_s(1000, 900, 10) == pytest.approx(0.01 + 10 * meter.pace.step_s, rel=0.05)


def test_wait_is_the_time_in_which_as_many_end() -> None:
    meter = PaceMeter(StepCostModel(), 0.0)
    meter.measure(1.0, 20)
    assert meter.wait_s(100) == pytest.approx(5.0)
    assert meter.wait_s(10**6) == 60.0
    meter.measure(2.0, 30)
    assert 5.0 < (meter.wait_s(100) or 0) < 10.0, "it follows, but not at once"


def test_latest_start() -> None:
    pace = Pace(per_prefill_token_s=0.01, per_pair_s=0.0, step_s=0.1)

    def latest_s(limits: TimeLimits) -> float:
        return limits.latest_start_s(pace, num_tokens=100, num_cached_tokens=50, num_output_tokens=20)

    assert latest_s(TimeLimits(end_by_s=10.0)) == pytest.approx(10 - 0.5 - 2.0)
    assert latest_s(TimeLimits(first_token_by_s=3.0)) == pytest.approx(3 - 0.5 - 0.1)
    assert latest_s(TimeLimits(end_by_s=10.0, first_token_by_s=3.0)) == pytest.approx(2.4)
    assert latest_s(TimeLimits(begin_s=9.0, end_by_s=10.0)) == pytest.approx(10 - 0.6)


def test_outputs_are_expected_as_the_tenant_s_were() -> None:
    expected = ExpectedOutputs()
    assert expected.tokens("a", 10**6) == 128
    assert expected.tokens("a", 5) == 5
    for _ in range(50):
        expected.ended("long", 1000)
        expected.ended("short", 10)
        expected.ended("short", 0)
    assert expected.tokens("long", 10**6) == pytest.approx(1000)
    assert expected.tokens("short", 10**6) == pytest.approx(10)
    assert 10 < expected.tokens("new", 10**6) < 1000
    for number in range(10_000):
        expected.ended(str(number), 7)
    assert len(expected._of_tenants) <= 4096
