"""Who a request is for: what sets tenants apart, and what each may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may ask of one ingress process. None sets no limit."""

    max_concurrent_requests: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Of prompts and of outputs."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever shares nothing with others but the machines."""

    name: str
    weight: float = 1.0
    """Its share, beside the shares of others, of what the workers do."""
    secret: bytes = b""
    """What the salts of its requests are made of."""
    limits: TenantLimits = TenantLimits()


ANONYMOUS = Tenant("")
"""Everybody, where no keys are asked for."""
