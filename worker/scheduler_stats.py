"""What the scheduler has done, in numbers. Counted where it decides, read when somebody asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagoda.worker.prefix_lookup import MissReason


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start, and sizes now."""

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    """Computed tokens that preemption threw away."""
    num_computed_tokens: int = 0
    """Tokens put through the model."""
    num_prompt_tokens: int = 0
    """Prompt tokens of admitted sequences."""
    num_cached_tokens: int = 0
    """Of these, tokens that a cached or shared block spared."""
    num_queried_tokens: int = 0
    """Prompt tokens looked up in the cache: all but those that a sample shares with another one. Each is a hit or a
    miss. A sequence that comes back from preemption does not count again."""
    num_hit_tokens: int = 0
    num_missed_tokens: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    num_finished: int = 0
    num_output_tokens: int = 0
    """Of sequences that have finished."""
    num_blocks: int = 0
    num_held_blocks: int = 0
    """Blocks that sequences hold."""

    def count_lookup(self, num_hit_tokens: int, num_missed_tokens: Mapping[MissReason, int]) -> None:
        """A prompt was looked up in the cache: what was found of it, and why the rest was not."""
        self.num_queried_tokens += num_hit_tokens + sum(num_missed_tokens.values())
        self.num_hit_tokens += num_hit_tokens
        for reason, num_tokens in num_missed_tokens.items():
            self.num_missed_tokens[reason] += num_tokens

    def count_start(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A sequence was admitted for the first time."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def count_preemption(self, num_computed_tokens: int) -> None:
        """A sequence lost its place, and with it what it had computed."""
        self.num_preemptions += 1
        self.num_preempted_tokens += num_computed_tokens

    def snapshot(
        self, *, num_running: int, num_waiting: int, num_blocks: int, num_held_blocks: int
    ) -> "SchedulerStats":
        """A copy that later counting leaves alone, with the sizes of this moment."""
        return replace(
            self,
            num_running=num_running,
            num_waiting=num_waiting,
            num_missed_tokens=self.num_missed_tokens.copy(),
            num_blocks=num_blocks,
            num_held_blocks=num_held_blocks,
        )
