"""The file that says who may use a service, `pagoda serve --tenants FILE`:

    tenants:
      - name: acme
        keys: ["sha256:5e88..."]        # `pagoda tenants add` makes a key and writes its hash
        secret: 3f1c...                 # what its cache is set apart with; with `secret_file` made from that
        weight: 2                       # the rest may be left out
        operator: true
        limits: {max_concurrent_requests: 8, requests_per_minute: 600, tokens_per_minute: 100000}
    secret_file: cluster.secret         # 32 bytes or more, beside this file
    public_prefixes:                    # what prompts of all tenants may share in the cache
      - "Translate to French:"
      - [{role: system, content: You are a helpful assistant.}]

Keys are 256 random bits, so nobody can try them one by one, however fast their hash is: one SHA-256, and none of the
slow hashes that passwords need, which would cost each request milliseconds. Who reads the file can use no key, but
knows the secrets, with which one can tell what is cached; so it is for the service's own eyes.
"""

import hmac
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.strict_yaml import read_yaml
from pagoda.cluster.tenants import Tenant, TenantLimits
from pagoda.worker.errors import ConfigError
from pagoda.worker.quoting import quoted

MAX_KEYS = 4096
"""In one file: each request's key is compared with all of them, which takes some 100 ns each."""
MAX_PUBLIC_PREFIXES = 1024
MIN_SECRET_BYTES = 32
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

PublicPrefix = str | tuple[dict[str, str], ...]
"""How prompts of completions begin, or the first messages of chats."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Limits(_Strict):
    max_concurrent_requests: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class _Tenant(_Strict):
    name: str
    keys: list[str] = []
    secret: str | None = None
    weight: float = 1.0
    operator: bool = False
    limits: _Limits = _Limits()


class _Message(_Strict):
    role: str
    content: str


class _File(_Strict):
    tenants: list[_Tenant]
    secret_file: str | None = None
    public_prefixes: list[str | list[_Message]] = []


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """What the file says."""

    keys: tuple[tuple[bytes, Tenant], ...]
    """SHA-256 of a key, and whose it is."""
    public_prefixes: tuple[PublicPrefix, ...] = ()

    def tenant_of(self, key: str) -> Tenant | None:
        """Whose key this is. Takes as long for a wrong one, and for one that is nearly right, as for any other."""
        shown, found = sha256(key.encode(errors="surrogatepass")).digest(), None
        for digest, tenant in self.keys:
            if hmac.compare_digest(digest, shown):
                found = tenant
        return found


def hash_of_key(key: str) -> str:
    """As it stands in the file."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def read_tenants_file(path: Path) -> TenantsFile:
    """Raises `ConfigError` naming the file and the field."""
    return parse_tenants(read_yaml(path), path)


def parse_tenants(content: Any, path: Path) -> TenantsFile:
    """The same of a file's content. `path` is where it comes from, and what `secret_file` is relative to."""
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        _, message = first_problem(error.errors(include_url=False, include_input=False))
        raise ConfigError(str(path), message) from None
    try:
        cluster_secret = _cluster_secret(path, file.secret_file)
        tenants = [_tenant(position, each, cluster_secret) for position, each in enumerate(file.tenants)]
        _refuse_twice("tenants.name", (tenant.name for tenant in tenants))
        _refuse_twice("tenants.secret", (tenant.secret for tenant in tenants))
        _refuse_twice("tenants.keys", (key for each in file.tenants for key in each.keys))
        keys = tuple(
            (bytes.fromhex(key.removeprefix("sha256:")), tenant)
            for each, tenant in zip(file.tenants, tenants, strict=True)
            for key in each.keys
        )
        for name, size, most in (
            ("tenants.keys", len(keys), MAX_KEYS),
            ("public_prefixes", len(file.public_prefixes), MAX_PUBLIC_PREFIXES),
        ):
            if size > most:
                raise ConfigError(name, f"may be {most}, not {size}")
    except ConfigError as error:
        raise ConfigError(str(path), str(error)) from error
    prefixes = tuple(
        each if isinstance(each, str) else tuple(message.model_dump() for message in each)
        for each in file.public_prefixes
    )
    return TenantsFile(keys, prefixes)


def _tenant(position: int, given: _Tenant, cluster_secret: bytes | None) -> Tenant:
    where = f"tenants.{position}"
    limits = TenantLimits(**given.limits.model_dump())
    for name, value in (("weight", given.weight), *((f"limits.{n}", v) for n, v in given.limits.model_dump().items())):
        if value is not None and not 0 < value < 2**53:
            raise ConfigError(f"{where}.{name}", f"must be a number > 0, got {value}")
    if _NAME.fullmatch(given.name) is None:
        raise ConfigError(f"{where}.name", f"must be 1 to 64 of letters, digits, . _ -, got {quoted(given.name)}")
    for key in given.keys:
        if _HASH.fullmatch(key) is None:
            raise ConfigError(f"{where}.keys", "must be sha256: and 64 hexadecimal digits each; never the key itself")
    if given.secret is not None:
        secret = given.secret.encode(errors="surrogatepass")
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"{where}.secret", f"must have at least {MIN_SECRET_BYTES} characters")
    elif cluster_secret is not None:
        secret = hmac.new(cluster_secret, b"tenant " + given.name.encode(), sha256).digest()
    else:
        raise ConfigError(f"{where}.secret", "is missing, and there is no secret_file to make it from")
    return Tenant(given.name, given.weight, secret, limits, is_operator=given.operator)


def _cluster_secret(path: Path, name: str | None) -> bytes | None:
    if name is None:
        return None
    try:
        secret = (path.parent / name).read_bytes()
    except (OSError, ValueError) as error:  # of which a path with a zero byte is one
        raise ConfigError("secret_file", f"cannot be read: {error}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError("secret_file", f"must hold at least {MIN_SECRET_BYTES} bytes")
    return secret


def _refuse_twice(field: str, values: Iterable[object]) -> None:
    """Two tenants of one name would share limits, of one secret their caches, of one key everything."""
    if any(count > 1 for count in Counter(values).values()):
        raise ConfigError(field, "one is there twice")
