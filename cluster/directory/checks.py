"""What a directory refuses, and the bounds of what it takes."""

from pagoda.worker.block_hash import HASH_BYTES
from pagoda.worker.errors import InvalidRequestError, PagodaError

MAX_HASHES = 4096
"""Of a prompt that are looked at."""
MAX_ID_BYTES = 256
MAX_NUM_WORKERS = 4096
MAX_NUM_GROUPS = 64
MAX_RESERVATION_S = 600.0
MAX_SAMPLES = 4096
MAX_PROMPT_TOKENS = 2**24
MAX_LIVE = 100_000
"""Requests of one worker."""
MAX_CLEARED = 64
"""Of one batch."""
MAX_RATE = 1e9
MAX_WORKER_ENTRIES = 8 * 2**20
"""Blocks of one worker over all tiers and groups; what is beyond is left out, and counted."""


class UnknownModelError(PagodaError):
    """No worker serves the model."""


class StaleEpochError(PagodaError):
    """A worker that started anew since then has spoken already."""


class MismatchError(PagodaError):
    """A worker whose blocks cannot be compared with those of the others of its model."""


def check_hashes(packed: bytes) -> None:
    if len(packed) % HASH_BYTES:
        raise InvalidRequestError("hashes", f"must be a multiple of {HASH_BYTES} bytes long, is {len(packed)}")


def check_id(name: str, value: str) -> None:
    if not 1 <= len(value.encode()) <= MAX_ID_BYTES:
        raise InvalidRequestError(name, f"must have 1 to {MAX_ID_BYTES} bytes")
