"""Which worker a request should go to. Standard library only; pure: the directory and the simulator use it alike.

Everything is in seconds, and everything is measured by the workers, so nothing needs to be tuned:

    cost = max(queue_s, restore_s) + prefill_s + block_wait_s + decode_penalty_s + eviction_s + crowding_s

    queue_s           computing the prompts that wait there already, and where more wait than can run, until others end
    restore_s         bringing blocks up from lower tiers, which overlaps with waiting
    prefill_s         computing what of the prompt is not cached there
    block_wait_s      until blocks are free that it lacks
    decode_penalty_s  how much longer the answer takes beside those that run there
    eviction_s        computing again later what its new blocks push out of the cache there
    crowding_s        how much later others come to their turn: where all have much to do, work that is done twice is
                      missing somewhere

The cheapest worker wins. Costs that differ by less than `TIE_RATIO` are as good as equal, since they are estimates:
then who holds more of the prompt goes first, then who has fewer blocks in use, then chance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

TIE_RATIO = 0.02
_TIE_S = 1e-4
DEFAULT_OUTPUT_TOKENS = 128
"""For answers whose length nobody has measured yet."""
MAX_BUSY_RATIO = 0.5
"""Work where a part r of the time is spent already delays what comes later by r / (1 - r) of itself. Taken for all
workers together: where one is busy and others are not, its queue says so. Here at most by itself, or one holder would
get everything when all are busy."""
MAX_RANKED = 8
"""Workers that a placement names; whoever is refused by all of them may go anywhere."""


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What a worker has measured of itself."""

    prefill_s_per_token: float = 1e-4
    prefill_s_per_token_and_context: float = 0.0
    """For each token, for each token before it."""
    step_base_s: float = 0.0
    """That a step takes whatever it computes."""
    step_s_per_sequence: float = 0.0
    """By which it grows with each sequence that decodes."""
    released_blocks_per_s: float = 0.0
    """0 if nothing has ended yet."""
    restore_s_per_token: float = 0.0
    """From lower tiers."""
    evicted_hit_ratio: float = 0.0
    """Of tokens pushed out of the cache, the part that was asked for again."""
    mean_output_tokens: float = 0.0
    """0 if nothing has ended yet."""
    busy_ratio: float = 0.0
    """The part of the time in which it computes."""

    def prefill_s(self, num_tokens: float, num_context: int) -> float:
        """Of `num_tokens` behind `num_context` others; each also sees those before it."""
        pairs = num_tokens * (num_context + num_tokens / 2)
        return self.prefill_s_per_token * num_tokens + self.prefill_s_per_token_and_context * pairs


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What runs and waits on a worker, promised requests included."""

    num_uncached_tokens: int = 0
    """Of prompts, still to be computed."""
    num_uncached_pairs: int = 0
    """Of these and the tokens that each of them attends to."""
    num_sequences: int = 0
    """That run or wait."""
    max_num_seqs: int = 1
    """That run at once."""
    num_free_blocks: int = 0
    """That nobody holds, cached ones included."""
    num_empty_blocks: int = 0
    """Free ones that cache nothing."""
    num_blocks: int = 1


@dataclass(slots=True)
class Candidate:
    """A worker as a request sees it. Not changed once it is made."""

    worker_id: str
    load: WorkerLoad
    rates: WorkerRates
    num_cached_blocks: int = 0
    """Of the prompt's first, in any tier."""
    num_lower_blocks: int = 0
    """Of these, on lower tiers than the device."""
    queue_s: float = -1.0
    """Computing the prompts that wait there; found out unless it is given."""

    def __post_init__(self) -> None:
        if self.queue_s < 0:
            load, rates = self.load, self.rates
            self.queue_s = (
                rates.prefill_s_per_token * load.num_uncached_tokens
                + rates.prefill_s_per_token_and_context * load.num_uncached_pairs
            )

    def holding(self, num_blocks: int, num_lower_blocks: int) -> "Candidate":
        """The same worker for a prompt of which it holds so much."""
        return Candidate(self.worker_id, self.load, self.rates, num_blocks, num_lower_blocks, self.queue_s)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed."""

    num_tokens: int
    block_size: int
    num_samples: int = 1
    max_output_tokens: int | None = None


class PlacementReason(StrEnum):
    """Why a request goes where it goes."""

    ONLY = "only"
    """There is no other worker."""
    PREFIX = "prefix"
    """Nobody holds more of it."""
    LOAD = "load"
    """Nobody holds anything of it; this worker is the least loaded."""
    SPREAD = "spread"
    """Others hold more of it, but have so much to do that computing it is sooner done."""


class Cost(NamedTuple):
    """Seconds."""

    queue_s: float
    restore_s: float
    prefill_s: float
    block_wait_s: float
    decode_penalty_s: float
    eviction_s: float
    crowding_s: float

    @property
    def total_s(self) -> float:
        return _total_s(self)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and why."""

    ranked: tuple[str, ...]
    """Workers, the best first."""
    reason: PlacementReason
    cost: Cost
    num_cached_tokens: int
    """At the best worker, in any tier; at least one token is always computed."""
    num_lower_tokens: int
    num_uncached_tokens: int
    """To be computed there."""
    num_new_blocks: int
    """That it needs there beside those it shares."""


def cost_of(prompt: Prompt, candidate: Candidate) -> Cost:
    """What placing `prompt` there costs, if there is nobody else."""
    return Cost(*_costs(prompt, [candidate])[0])


def place(
    prompt: Prompt, candidates: Sequence[Candidate], draw: Callable[[], float], *, pinned: str | None = None
) -> Placement | None:
    """Rank `candidates`, cheapest first, but `pinned` before all others. None if there are none.

    `draw` gives numbers in [0, 1) for ties.
    """
    if not candidates:
        return None
    costs = _costs(prompt, candidates)
    totals = [_total_s(cost) for cost in costs]
    tie_s = min(totals) * (1 + TIE_RATIO) + _TIE_S
    equals = [index for index, total in enumerate(totals) if total <= tie_s]
    if len(equals) > 1:
        equals.sort(key=lambda index: _order_of_equals(candidates[index], draw))
    others = [index for index, total in enumerate(totals) if not total <= tie_s]
    others.sort(key=totals.__getitem__)
    ranking = equals + others
    if pinned is not None:
        ranking.sort(key=lambda index: candidates[index].worker_id != pinned)
    best = candidates[ranking[0]]
    num_cached = _num_cached_tokens(prompt, best.num_cached_blocks)
    return Placement(
        ranked=tuple(candidates[index].worker_id for index in ranking[:MAX_RANKED]),
        reason=_reason(best.num_cached_blocks, candidates),
        cost=Cost(*costs[ranking[0]]),
        num_cached_tokens=num_cached,
        num_lower_tokens=best.num_lower_blocks * prompt.block_size,
        num_uncached_tokens=prompt.num_tokens - num_cached,
        num_new_blocks=max(0, prompt.num_tokens // prompt.block_size - best.num_cached_blocks) + prompt.num_samples,
    )


_Terms = tuple[float, float, float, float, float, float, float]


def _costs(prompt: Prompt, candidates: Sequence[Candidate]) -> list[_Terms]:
    """Each one's terms, in `Cost`'s order. Written for speed: this runs for every worker and request."""
    num_tokens, block_size, num_samples = prompt.num_tokens, prompt.block_size, prompt.num_samples
    most_output = prompt.max_output_tokens
    num_full_blocks = num_tokens // block_size
    busy = min(sum(candidate.rates.busy_ratio for candidate in candidates) / len(candidates), MAX_BUSY_RATIO)
    delay_of_others = busy / (1 - busy)
    costs = []
    for candidate in candidates:
        load, rates, num_cached_blocks = candidate.load, candidate.rates, candidate.num_cached_blocks
        num_cached = num_cached_blocks * block_size if num_cached_blocks else 0
        if num_cached >= num_tokens:
            num_cached = num_tokens - 1
        num_rest = num_tokens - num_cached
        # Samples share the prompt's full blocks, and each has an open one.
        num_new_blocks = num_full_blocks - num_cached_blocks + num_samples
        mean_output = rates.mean_output_tokens or DEFAULT_OUTPUT_TOKENS
        num_output = mean_output if most_output is None or most_output > mean_output else most_output
        longer_s = rates.step_s_per_sequence * num_output
        per_token_s, per_pair_s = rates.prefill_s_per_token, rates.prefill_s_per_token_and_context
        num_ahead, num_places = load.num_sequences, load.max_num_seqs
        queue_s = candidate.queue_s
        if num_ahead + num_samples > num_places:
            # What cannot run at once waits for a place as well as for its prompt: until others' answers are whole.
            place_s = mean_output * (rates.step_base_s / num_places + rates.step_s_per_sequence)
            queue_s += (num_ahead + num_samples - num_places) * place_s
            num_ahead = min(num_ahead, num_places)
        block_wait_s = eviction_s = 0.0
        if num_new_blocks > load.num_empty_blocks:
            num_missing = num_new_blocks - load.num_free_blocks
            if num_missing > 0:
                block_wait_s = _block_wait_s(num_missing, block_size, rates)
            if rates.evicted_hit_ratio:
                num_evicted = min(num_new_blocks, load.num_blocks) - load.num_empty_blocks
                eviction_s = rates.evicted_hit_ratio * rates.prefill_s(max(0, num_evicted) * block_size, 0)
        prefill_s = per_token_s * num_rest + per_pair_s * num_rest * (num_cached + num_rest / 2)
        costs.append(
            (
                queue_s,
                candidate.num_lower_blocks * block_size * rates.restore_s_per_token,
                prefill_s,
                block_wait_s,
                num_ahead * longer_s,
                eviction_s,
                prefill_s * delay_of_others,
            )
        )
    return costs


def _total_s(cost: _Terms) -> float:
    queue_s, restore_s, prefill_s, block_wait_s, decode_penalty_s, eviction_s, crowding_s = cost
    return max(queue_s, restore_s) + prefill_s + block_wait_s + decode_penalty_s + eviction_s + crowding_s


def _order_of_equals(candidate: Candidate, draw: Callable[[], float]) -> tuple[int, int, float]:
    load = candidate.load
    return -candidate.num_cached_blocks, load.num_blocks - load.num_free_blocks, draw()


def _reason(num_best: int, candidates: Sequence[Candidate]) -> PlacementReason:
    if len(candidates) == 1:
        return PlacementReason.ONLY
    num_most = max(candidate.num_cached_blocks for candidate in candidates)
    if not num_most:
        return PlacementReason.LOAD
    return PlacementReason.PREFIX if num_best == num_most else PlacementReason.SPREAD


def _num_cached_tokens(prompt: Prompt, num_cached_blocks: int) -> int:
    return min(num_cached_blocks * prompt.block_size, prompt.num_tokens - 1)


def _block_wait_s(num_missing: int, block_size: int, rates: WorkerRates) -> float:
    """Without a measured rate, as long as it takes to compute what the blocks hold: never nothing."""
    if rates.released_blocks_per_s > 0:
        return num_missing / rates.released_blocks_per_s
    return num_missing * block_size * rates.prefill_s_per_token
