"""Who a request is for: what sets tenants apart, and what each may take."""

import hmac
import secrets
import uuid
from dataclasses import dataclass
from hashlib import sha256

from pagoda.worker.block_hash import hash_of_parts
from pagoda.worker.errors import InvalidRequestError

MAX_CLIENT_SALT = 256
"""Characters."""
_OWNER_BYTES = 8


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
    is_operator: bool = False
    """May see what the whole service does, and end anybody's requests."""

    def salt(self, client_salt: str | None) -> bytes:
        """What sets the blocks of its requests apart from those of others, and of those with another `client_salt`.

        Only who knows the secret can make it. Empty where there is neither: then all share. Raises
        `InvalidRequestError`.
        """
        if client_salt is not None and len(client_salt) > MAX_CLIENT_SALT:
            raise InvalidRequestError("cache_salt", f"may have {MAX_CLIENT_SALT} characters, not {len(client_salt)}")
        raw = (client_salt or "").encode(errors="surrogatepass")
        if self.secret:
            return hash_of_parts(self.secret, raw)
        return hash_of_parts(raw) if raw else b""

    def new_request_id(self, given: str | None) -> str:
        """An id for the engine that begins with `given`. Clients may use one twice at a time, so it goes on at random.

        At its end it says, to those who know the secret, whose it is.
        """
        unique = uuid.uuid4().hex if given is None else f"{given}-{secrets.token_hex(8)}"
        return f"{unique}-{self._mark(unique)}" if self.secret else unique

    def may_end(self, request_id: str) -> bool:
        """Whether a request, by its id for the engine, is its own, or anybody's for an operator."""
        unique, _, mark = request_id.rpartition("-")
        is_own = bool(self.secret) and hmac.compare_digest(mark.encode(), self._mark(unique).encode())
        return self.is_operator or is_own

    def _mark(self, unique: str) -> str:
        parts = hash_of_parts(b"request", unique.encode(errors="surrogatepass"))
        return hmac.new(self.secret, parts, sha256).digest()[:_OWNER_BYTES].hex()


ANONYMOUS = Tenant("", is_operator=True)
"""Everybody, where no keys are asked for."""
