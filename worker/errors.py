"""Every error the worker raises on purpose.

PagodaError
├── ConfigError           a setting is wrong; names the field and what is allowed
├── ModelError            a model folder cannot be used; names the file or tensor
├── InvalidRequestError   the client's mistake; names the field; raised before any work
├── OverloadedError       there is no room for it, or no time; try again later
├── DeadlineExceededError the time that the request may take is over
├── EngineStoppedError    the engine is draining, stopped or dead
├── RankLostError         one of the ranks that share a model is gone, and the worker with it
└── IntegrityError        our own bookkeeping is wrong; stops the replica
"""

from pagoda.worker.quoting import shortened


class PagodaError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PagodaError):
    """A setting is out of range, unknown or contradicts another one. `setting` is the name of its field."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(setting, message)
        self.setting = setting
        self.message = message

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}"


class ModelError(PagodaError):
    """A model folder is missing, incomplete or of an unsupported kind."""


class InvalidRequestError(PagodaError):
    """A request that cannot be served as it stands. `field` is the API name of the offending field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = shortened(message)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class OverloadedError(PagodaError):
    """No room for the request, or no time; `retry_after_s` says in how many seconds there may be, if that is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(PagodaError):
    """The time that the request may take is over."""


class EngineStoppedError(PagodaError):
    """The engine takes no requests any more."""


class RankLostError(PagodaError):
    """One of the ranks that share a model failed, does not answer or is gone. The others cannot go on without it."""


class IntegrityError(PagodaError):
    """Block bookkeeping contradicts itself: a bug, never the client's fault."""
