"""What an engine has to do, as numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What there is to do."""

    num_uncached_tokens: int
    """Prompt tokens still to be computed."""
    num_uncached_pairs: int
    """Of these and the tokens that each of them attends to."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    """That nobody holds, cached ones included; of layers of several kinds, blocks in each group."""
    num_empty_blocks: int
    """Free ones that cache nothing."""
