"""What each tenant may ask of this ingress process: requests at once, and requests and tokens a minute.

Limits hold for each ingress process by itself: with several of them, a tenant may have as many times as much. Rates are
token buckets that hold what a minute brings, so a tenant may use a minute's worth at once. Output tokens are taken as
a request comes, as many as it may generate but no more than `MAX_RESERVED_TOKENS`, and put right when it has ended. No
clock: times are arguments, in seconds.
"""

from dataclasses import dataclass
from typing import Literal

from pagoda.cluster.tenants import Tenant, TenantLimits
from pagoda.worker.errors import OverloadedError

LimitReason = Literal["concurrency", "request_rate", "token_rate"]
MAX_RESERVED_TOKENS = 1024
_MINUTE_S = 60.0
_MAX_IDLE = 1024
"""Tenants that are remembered though nothing of theirs runs."""
_WEIGHT = 0.2
"""Of the last request in the mean duration."""


class TenantLimitError(OverloadedError):
    """The tenant asks for more than it may, just now. `reason` says of what; `retry_after_s` when there is more."""

    def __init__(self, message: str, *, reason: LimitReason, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason: LimitReason = reason


class TokenBucket:
    """Fills evenly, up to what a minute brings. What is taken beyond that has to be waited for."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._as_of_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is there; more than it can hold is as good as there once it is full."""
        self._fill(now_s)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Whether it is there or not. A negative amount gives back."""
        self._fill(now_s)
        self._level = min(self.per_minute, self._level - amount)

    def _fill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._as_of_s) * self.per_minute / _MINUTE_S
        self._level = min(self.per_minute, self._level + gained)
        self._as_of_s = max(now_s, self._as_of_s)


@dataclass(slots=True)
class Admission:
    """A request that was let in. `num_output_tokens` is for whoever reads its answer to count up."""

    tenant: str
    begin_s: float
    num_reserved_tokens: int
    """Of output."""
    num_output_tokens: int = 0


class _Gate:
    """One tenant's."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        self.limits = limits
        self.num_running = 0
        self.duration_s = 1.0
        """Of its requests, on average."""
        self.requests = _bucket(limits.requests_per_minute, now_s)
        self.tokens = _bucket(limits.tokens_per_minute, now_s)

    def change(self, limits: TenantLimits, now_s: float) -> None:
        """The operator has changed the limits; what runs still counts."""
        self.limits = limits
        self.requests = _bucket(limits.requests_per_minute, now_s)
        self.tokens = _bucket(limits.tokens_per_minute, now_s)

    def check(self, num_tokens: int, now_s: float) -> None:
        most = self.limits.max_concurrent_requests
        if most is not None and self.num_running >= most:
            raise TenantLimitError(
                f"{self.num_running} requests run already, of at most {most}",
                reason="concurrency",
                retry_after_s=self.duration_s / max(1, most),
            )
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)) > 0:
            raise TenantLimitError(
                f"at most {self.requests.per_minute:g} requests a minute", reason="request_rate", retry_after_s=wait_s
            )
        if self.tokens is not None and (wait_s := self.tokens.wait_s(num_tokens, now_s)) > 0:
            raise TenantLimitError(
                f"at most {self.tokens.per_minute:g} tokens a minute", reason="token_rate", retry_after_s=wait_s
            )


class TenantGates:
    """All tenants' of one ingress process. One event loop."""

    def __init__(self) -> None:
        self._gates: dict[str, _Gate] = {}

    def admit(self, tenant: Tenant, *, num_prompt_tokens: int, num_output_tokens: int, now_s: float) -> Admission:
        """Let a request in, which must be released. Raises `TenantLimitError`, and then counts nothing.

        `num_output_tokens` is the most that it may generate, of all samples.
        """
        gate = self._gates.get(tenant.name)
        if gate is None:
            if len(self._gates) >= _MAX_IDLE:
                self._gates = {name: gate for name, gate in self._gates.items() if gate.num_running}
            gate = self._gates[tenant.name] = _Gate(tenant.limits, now_s)
        elif gate.limits != tenant.limits:
            gate.change(tenant.limits, now_s)
        num_reserved_tokens = min(num_output_tokens, MAX_RESERVED_TOKENS)
        gate.check(num_prompt_tokens + num_reserved_tokens, now_s)
        gate.num_running += 1
        if gate.requests is not None:
            gate.requests.take(1, now_s)
        if gate.tokens is not None:
            gate.tokens.take(num_prompt_tokens + num_reserved_tokens, now_s)
        return Admission(tenant.name, now_s, num_reserved_tokens)

    def release(self, admission: Admission, now_s: float) -> None:
        """It has ended, however."""
        gate = self._gates[admission.tenant]
        gate.num_running -= 1
        gate.duration_s += _WEIGHT * (now_s - admission.begin_s - gate.duration_s)
        if gate.tokens is not None:
            gate.tokens.take(admission.num_output_tokens - admission.num_reserved_tokens, now_s)


def _bucket(per_minute: float | None, now_s: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now_s)
