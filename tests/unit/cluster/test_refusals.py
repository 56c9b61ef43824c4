"""What clients are told that should try again: why, and when."""

import grpc
import pytest
from ascii_service import LIMITS, AsciiTokenizer, FakeWorkerClient, out

from pagoda.cluster.ingress.grpc_errors import status_of
from pagoda.cluster.ingress.http_errors import describe
from pagoda.cluster.ingress.live_requests import DrainingError
from pagoda.cluster.ingress.refusals import REASONS, refusal_reason, retry_after_s
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.tenant_limits import TenantLimitError
from pagoda.cluster.tenants import Tenant, TenantLimits
from pagoda.worker.errors import DeadlineExceededError, EngineStoppedError, OverloadedError, PagodaError
from pagoda.worker.types import FinishReason, SamplingParams

LIMITED = Tenant("a", limits=TenantLimits(max_concurrent_requests=1, tokens_per_minute=6000))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (OverloadedError("full"), 1),
        (OverloadedError("full", retry_after_s=0.2), 1),
        (OverloadedError("full", retry_after_s=7.1), 8),
        (OverloadedError("full", retry_after_s=1e9), 3600),
        (TenantLimitError("too many", reason="request_rate", retry_after_s=2.5), 3),
        (EngineStoppedError("stopped"), 1),
    ],
)
def test_when_to_try_again(error: PagodaError, seconds: int) -> None:
    """Whole seconds, as HTTP wants them, and never none."""
    assert retry_after_s(error) == seconds
    assert status_of(error).metadata == (("retry-after", str(seconds)),)
    assert refusal_reason(error) in REASONS


def test_statuses() -> None:
    limited = TenantLimitError("too many", reason="token_rate", retry_after_s=2.0)
    assert status_of(limited).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(DeadlineExceededError("over")).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert status_of(DeadlineExceededError("over")).metadata == ()
    for error, status, code in (
        (limited, 429, "rate_limit_exceeded"),
        (OverloadedError("full"), 429, "overloaded"),
        (DeadlineExceededError("over"), 504, "deadline_exceeded"),
    ):
        found, body = describe(error)
        assert (found, body["error"]["code"]) == (status, code)


async def drained(tested: InferenceService, tenant: Tenant, **sampling: int) -> int:
    generation = tested.generate([1] * 10, SamplingParams(**sampling), tenant=tenant)
    return sum([len(batch) async for batch in generation.outputs])


async def test_tenant_over_its_limit_does_not_reach_a_worker() -> None:
    reasons: list[str] = []
    client = FakeWorkerClient([out(0, "a")], then_hangs=True)
    tested = InferenceService(AsciiTokenizer(), client, LIMITS, on_refused=reasons.append)  # type: ignore[arg-type]
    running = tested.generate([1], SamplingParams(), tenant=LIMITED).outputs
    await anext(running)
    with pytest.raises(TenantLimitError):
        await drained(tested, LIMITED)
    await drained_first(tested, Tenant("b"))
    assert len(client.requests) == 2
    assert reasons == ["concurrency"]
    await running.aclose()
    await drained_first(tested, LIMITED)
    assert len(client.requests) == 3


async def drained_first(tested: InferenceService, tenant: Tenant) -> None:
    outputs = tested.generate([1], SamplingParams(), tenant=tenant).outputs
    await anext(outputs)
    await outputs.aclose()


async def test_tokens_that_were_not_generated_come_back() -> None:
    """Ninety tokens are reserved each time, two are generated: of 6,000 a minute that makes more than 66 requests."""
    client = FakeWorkerClient([out(0, "a")], [out(0, "b", FinishReason.LENGTH)])
    tested = InferenceService(AsciiTokenizer(), client, LIMITS)  # type: ignore[arg-type]
    for _ in range(200):
        assert await drained(tested, LIMITED, max_tokens=90) == 2


async def test_refusals_are_counted_and_failures_are_not() -> None:
    reasons: list[str] = []

    async def run(client: FakeWorkerClient, error: type[PagodaError]) -> InferenceService:
        tested = InferenceService(AsciiTokenizer(), client, LIMITS, on_refused=reasons.append)  # type: ignore[arg-type]
        with pytest.raises(error):
            await drained(tested, Tenant("a"))
        return tested

    await run(FakeWorkerClient(error=OverloadedError("full")), OverloadedError)
    stopped = await run(FakeWorkerClient(error=EngineStoppedError("gone")), EngineStoppedError)
    assert reasons == ["overloaded", "unavailable"]
    await run(FakeWorkerClient([out(0, "a")], then_fails=True), EngineStoppedError)
    assert reasons == ["overloaded", "unavailable"], "it had begun"
    await stopped.drain(0.0)
    with pytest.raises(DrainingError):
        await drained(stopped, Tenant("a"))
    assert reasons[2:] == ["unavailable"]
