"""The tenants as an ingress process knows them: what their file says, read again whenever it changes."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pagoda.cluster.tenants import ANONYMOUS, Tenant
from pagoda.cluster.tenants_file import TenantsFile, read_tenants_file
from pagoda.worker.errors import PagodaError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_PERIOD_S = 1.0
_SCHEME = "bearer "

Authenticate = Callable[[str | None], Tenant]
"""Whose request it is by what its `Authorization` says, None if it says nothing. Raises `UnauthenticatedError`."""


class UnauthenticatedError(PagodaError):
    """The request shows no key, or one that is not valid."""


class NotAllowedError(PagodaError):
    """The key is valid, but not for this."""


def anybody(authorization: str | None) -> Tenant:  # noqa: ARG001  (whatever it says)
    """An `Authenticate` for services without tenants."""
    return ANONYMOUS


class TenantRegistry:
    """Authenticates by the file at `path`. One event loop."""

    def __init__(self, path: Path, on_change: Callable[[TenantsFile], None] = lambda _: None) -> None:
        """Reads the file, which takes milliseconds. Raises `ConfigError`, and whatever `on_change` raises.

        `on_change` is called now and, on a thread of its own, with each new content, before that counts; if it raises,
        the old one goes on.
        """
        self._path = path
        self._on_change = on_change
        self._signature = _signature_of(path)
        self._file = read_tenants_file(path)
        on_change(self._file)

    def authenticate(self, authorization: str | None) -> Tenant:
        """Implements `Authenticate`."""
        if authorization is None:
            raise UnauthenticatedError("you did not provide an API key: send it as Authorization: Bearer KEY")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("Authorization must be: Bearer KEY")
        tenant = self._file.tenant_of(authorization[len(_SCHEME) :].strip())
        if tenant is None:
            raise UnauthenticatedError("the API key is not valid")
        return tenant

    async def watch(self) -> None:
        """Look every second whether the file has changed, until cancelled. One that is broken leaves all as it is."""
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Look now."""
        self._file = await asyncio.to_thread(self._newest)

    def _newest(self) -> TenantsFile:
        signature = _signature_of(self._path)
        if signature == self._signature:
            return self._file
        self._signature = signature  # a broken file is complained of once
        try:
            file = read_tenants_file(self._path)
            self._on_change(file)
        except Exception as error:
            logger.error("the tenants stay as they were: %s", error, exc_info=not isinstance(error, PagodaError))
            return self._file
        logger.warning("%s was read again: %d keys", self._path, len(file.keys))
        return file


def _signature_of(path: Path) -> tuple[int, ...] | None:
    """Differs for another content; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
