"""What a tenant may ask of one ingress, and when it may ask again."""

import random

import pytest

from pagoda.cluster.ingress.tenant_limits import (
    MAX_RESERVED_TOKENS,
    Admission,
    TenantGates,
    TenantLimitError,
    TokenBucket,
)
from pagoda.cluster.tenants import Tenant, TenantLimits


def admit(gates: TenantGates, tenant: Tenant, now_s: float, *, prompt: int = 10, output: int = 10) -> Admission:
    return gates.admit(tenant, num_prompt_tokens=prompt, num_output_tokens=output, now_s=now_s)


def refusal(
    gates: TenantGates, tenant: Tenant, now_s: float, *, prompt: int = 10, output: int = 10
) -> TenantLimitError:
    with pytest.raises(TenantLimitError) as error:
        admit(gates, tenant, now_s, prompt=prompt, output=output)
    return error.value


def test_no_limits_no_refusals() -> None:
    gates = TenantGates()
    for _ in range(1000):
        admit(gates, Tenant("a"), 0.0, prompt=10**6)


def test_so_many_run_at_once() -> None:
    """Who is refused is told to come back when one may have ended."""
    gates, tenant = TenantGates(), Tenant("a", limits=TenantLimits(max_concurrent_requests=2))
    first = admit(gates, tenant, 0.0)
    admit(gates, tenant, 0.0)
    error = refusal(gates, tenant, 0.0)
    assert (error.reason, error.retry_after_s) == ("concurrency", 0.5)
    admit(gates, Tenant("b", limits=tenant.limits), 0.0)
    gates.release(first, 5.0)
    admit(gates, tenant, 5.0)
    assert refusal(gates, tenant, 5.0).retry_after_s == pytest.approx(0.9), "requests have taken longer since"


def test_requests_a_minute() -> None:
    """A minute's worth at once, then one each second; a refused one costs nothing."""
    gates, tenant = TenantGates(), Tenant("a", limits=TenantLimits(requests_per_minute=60))
    for _ in range(60):
        gates.release(admit(gates, tenant, 100.0), 100.0)
    for _ in range(5):
        error = refusal(gates, tenant, 100.25)
        assert (error.reason, error.retry_after_s) == ("request_rate", pytest.approx(0.75))
    admit(gates, tenant, 101.0)
    refusal(gates, tenant, 101.0)


def test_tokens_a_minute() -> None:
    """The prompt counts at once and so does what may be generated; what was not generated comes back."""
    gates, tenant = TenantGates(), Tenant("a", limits=TenantLimits(tokens_per_minute=600))
    admission = admit(gates, tenant, 0.0, prompt=200, output=300)
    error = refusal(gates, tenant, 0.0, prompt=200, output=300)
    assert (error.reason, error.retry_after_s) == ("token_rate", pytest.approx(40.0))
    admission.num_output_tokens = 20
    gates.release(admission, 0.0)
    assert refusal(gates, tenant, 0.0, prompt=200, output=300).retry_after_s == pytest.approx(12.0)
    admit(gates, tenant, 12.0, prompt=200, output=300)


def test_only_so_much_output_is_reserved_and_all_is_counted() -> None:
    """Nobody is refused for the sake of tokens that a request is unlikely to generate; if it does, they are owed."""
    gates, tenant = TenantGates(), Tenant("a", limits=TenantLimits(tokens_per_minute=3000))
    admission = admit(gates, tenant, 0.0, prompt=0, output=100_000)
    assert admission.num_reserved_tokens == MAX_RESERVED_TOKENS
    admission.num_output_tokens = 6000
    gates.release(admission, 0.0)
    assert refusal(gates, tenant, 0.0, prompt=0, output=0).retry_after_s == pytest.approx(60.0)


def test_one_that_is_larger_than_a_minute_s_worth_may_come_when_nothing_was_used() -> None:
    """It would be refused for ever. What it takes beyond is waited for by the next one."""
    gates, tenant = TenantGates(), Tenant("a", limits=TenantLimits(tokens_per_minute=100))
    admit(gates, tenant, 0.0, prompt=1000, output=0)
    assert refusal(gates, tenant, 0.0, prompt=1, output=0).retry_after_s == pytest.approx(60 * 9.01)


def test_new_limits_count_from_now_and_what_runs_still_counts() -> None:
    gates = TenantGates()
    admission = admit(gates, Tenant("a"), 0.0)
    tenant = Tenant("a", limits=TenantLimits(max_concurrent_requests=1, tokens_per_minute=600))
    assert refusal(gates, tenant, 0.0).reason == "concurrency"
    gates.release(admission, 0.0)
    admit(gates, tenant, 0.0)


def test_nothing_piles_up_for_tenants_that_are_gone() -> None:
    gates = TenantGates()
    for number in range(5000):
        gates.release(admit(gates, Tenant(str(number)), 0.0), 1.0)
    assert len(gates._gates) <= 1024


def test_a_bucket_never_lets_more_through_than_its_rate() -> None:
    """Whatever is asked for whenever: after t seconds no more than a minute's worth and t seconds' worth."""
    source = random.Random(4)
    for _ in range(50):
        per_minute = source.uniform(10, 1000)
        bucket, now_s, taken = TokenBucket(per_minute, 0.0), 0.0, 0.0
        for _ in range(200):
            now_s += source.expovariate(1.0)
            amount = source.uniform(0, per_minute / 5)
            wait_s = bucket.wait_s(amount, now_s)
            if source.random() < 0.5:
                now_s += wait_s + 1e-6
                wait_s = bucket.wait_s(amount, now_s)
                assert wait_s == 0, "it is there when it was said to be"
            if wait_s == 0:
                bucket.take(amount, now_s)
                taken += amount
            assert taken <= per_minute * (1 + now_s / 60) + 1e-6
