"""Decides what each step computes. Standard library only: no tensors, no clock, no threads.

One step is schedule -> run -> sample -> update:

    plan = scheduler.schedule()          # who runs, with how many tokens, in which blocks
    result = executor.execute(plan)
    outputs = scheduler.update(plan, result)      # or scheduler.fail(plan, error) if execute raised

Rules that hold at all times:

- A sequence is admitted only if all its tokens fit the free blocks, which it then gets (where layers see a window, as
  many as it ever holds at once); so a prompt computed in chunks does not get stuck half-way.
- Of one priority, tenants take turns (`fair_turns.py`), and within a tenant who came first goes first.
- When decoding needs a block and none is free, the running sequence of the worst priority that its tenant started last,
  of the tenant that holds most for its weight, is preempted: its blocks are freed, and it computes its tokens again
  later. So may be, one a step, the last one of a tenant over its share, for one under its share (`shares.py`). A step
  that preempts admits nobody but that one.
- A tenant's first running sequence is preempted only if nobody runs behind it, or for a better priority; and who starts
  in turn comes behind those that run. A sequence that goes first can therefore always run, and everyone comes to be
  first: nobody starves.
- A request that runs alone starts when nothing runs, and nobody else starts before it has ended.
- Nothing is computed twice at the same time: whoever is admitted finds all that running sequences have computed or
  compute in this very step; and nobody is admitted while one of them still has tokens to schedule, since that one
  took what was left of the budget.
"""

from bisect import insort
from math import inf
from operator import attrgetter

from pagoda.worker.block_hash import HashChain
from pagoda.worker.config import EngineLimits, SchedulerConfig
from pagoda.worker.cost_model import StepShape
from pagoda.worker.deadlines import Deadlines, Pace, TimeLimits
from pagoda.worker.engine_load import EngineLoad
from pagoda.worker.errors import IntegrityError
from pagoda.worker.expected_outputs import ExpectedOutputs
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.sequence import Sequence, SequenceState, samples_of
from pagoda.worker.shares import newest_of_largest, swap_for_share, takes_spare_place
from pagoda.worker.types import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestId,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
)
from pagoda.worker.waiting_queue import WaitingQueue

_ORDER = attrgetter("order")
_LONG_OUTPUT = 2.0
"""Outputs are planned with that are so many times as long as the tenant's are on average: most are no longer."""
_RETRY_STEPS = 16
"""After which a sequence that did not fit is tried again, though no block has become free."""


class Scheduler:
    """Continuous batching over one KV manager. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: EngineLimits,
        manager: KVManager,
        *,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.limits = limits
        self.manager = manager
        self.eos_token_ids = eos_token_ids
        self.stats = SchedulerStats()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._running: list[Sequence] = []
        """In order: who goes first, first."""
        self._waiting = WaitingQueue()
        self._expected = ExpectedOutputs()
        self._deadlines = Deadlines()
        self._dropped: list[SequenceId] = []
        self._arrivals = 0
        self._step = 0
        self._refused: tuple[SequenceId, int, int] | None = None
        """The waiting sequence that last did not fit, how many blocks were free then, and in which step."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_sequences

    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(
        self, request: Request, *, seed: int, hash_chain: HashChain | None, limits: TimeLimits | None = None
    ) -> None:
        """Queue a validated request's samples. `hash_chain` None keeps it out of the prefix cache.

        Its `limits`, if it has some, are on the clock of the times that `expire` is told.
        """
        if request.request_id in self._requests:
            raise IntegrityError(f"request {request.request_id} is here already")
        self._arrivals += 1
        samples = samples_of(
            request,
            arrival=self._arrivals,
            seed=seed,
            max_model_len=self.limits.max_model_len,
            eos_token_ids=self.eos_token_ids,
            hash_chain=hash_chain,
            block_size=self.manager.block_size,
        )
        self._requests[request.request_id] = samples
        samples[0].num_expected_tokens = self.manager.lookup(samples[0]).num_blocks * self.manager.block_size
        for sequence in samples:
            self._sequences[sequence.sequence_id] = sequence
            self._waiting.push(sequence)
        if limits is not None:
            self._deadlines.add(samples, limits, look_s=-inf)

    def abort(
        self, request_id: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceOutput]:
        """End what is left of a request, or of one of its samples; with `reason` stop if its reader has found the end.

        Unknown and ended ones are ignored: aborts may come late or twice.
        """
        return [
            self._finish(sequence, reason)
            for sequence in self._requests.get(request_id, ())
            if sequence.state is not SequenceState.FINISHED and index in (None, sequence.index)
        ]

    def shed_excess(self) -> list[SequenceOutput]:
        """End requests that wait until no more sequences are here than may run and wait, with reason shed.

        Those go that came last of the tenant that has most waiting for its weight, and of which nothing has begun.
        """
        outputs: list[SequenceOutput] = []
        room = self.limits.max_num_seqs + self.limits.max_num_waiting
        while len(self._sequences) > room:
            sequence = self._waiting.newest_of_longest(self._is_untouched)
            if sequence is None:
                break
            outputs += self._end_request(sequence, FinishReason.SHED, "too many requests wait; try again later")
        return outputs

    def expire(self, now_s: float, pace: Pace) -> list[SequenceOutput]:
        """End requests whose time is over, with reason deadline; and with reason shed those that nothing was done for
        yet and that can no longer be in time, at the `pace` of this engine."""
        outputs: list[SequenceOutput] = []
        for limits, samples in self._deadlines.due(now_s):
            first, latest_s = samples[0], limits.end_by_s
            if self._is_untouched(first):
                num_output_tokens = _LONG_OUTPUT * self._expected.tokens(first.request.tenant, first.max_tokens)
                latest_s = limits.latest_start_s(
                    pace,
                    num_tokens=first.num_tokens,
                    num_cached_tokens=first.num_expected_tokens,
                    num_output_tokens=min(first.max_tokens, num_output_tokens),
                )
            if now_s >= limits.end_by_s:
                outputs += self._end_request(first, FinishReason.DEADLINE)
            elif now_s >= latest_s:
                outputs += self._end_request(first, FinishReason.SHED, "it can no longer be in time; try again later")
            else:
                self._deadlines.add(samples, limits, look_s=latest_s)
        return outputs

    def schedule(self) -> SchedulerOutput:
        """Plan one step. The plan may be empty if every waiting sequence waits for blocks."""
        self._step += 1
        plan = SchedulerOutput(step=self._step)
        num_preemptions = self.stats.num_preemptions
        has_swapped = self._make_room()
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if self.stats.num_preemptions == num_preemptions + has_swapped:
            self._admit(plan, budget, most=1 if has_swapped else self.config.max_num_seqs)
        plan.dropped, self._dropped = self._dropped, []
        plan.block_updates = self.manager.take_updates()
        return plan

    def begun_alone(self, plan: SchedulerOutput) -> list[SequenceOutput]:
        """Outputs without anything in them, which say that requests that run alone begin with this plan.

        Whoever gave them must know that before it is run, since a worker that dies in it died of them.
        """
        started = (self._sequences[new.sequence_id] for new in plan.new)
        return [sequence.output(()) for sequence in started if sequence.request.runs_alone]

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Take a step's tokens. Returns one output per sequence that got a token or prompt log probabilities."""
        outputs = []
        sampled = result.sampled
        self.manager.finish_step()
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self._sequences[sequence_id]
            sequence.num_computed_tokens += num_tokens
            self.stats.num_computed_tokens += num_tokens
            prompt_logprobs = result.prompt_logprobs.get(sequence_id, ())
            sequence.next_prompt_logprob += len(prompt_logprobs)
            token_id = sampled.get(sequence_id)
            if token_id is None:
                if prompt_logprobs:
                    outputs.append(sequence.output((), prompt_logprobs=prompt_logprobs))
                continue
            reason = sequence.append(token_id)
            if reason is not None:
                self._finish(sequence, reason)
            logprobs = result.logprobs.get(sequence_id)
            outputs.append(
                sequence.output(
                    (token_id,),
                    logprobs=() if logprobs is None else (logprobs,),
                    prompt_logprobs=prompt_logprobs,
                )
            )
        return outputs

    def fail(self, plan: SchedulerOutput, error: str) -> list[SequenceOutput]:
        """End every sequence of a step that could not be run; what the step published is withdrawn."""
        self.manager.fail_step()
        # Perhaps no rank has heard of them. Of the rest of the plan all sequences end.
        self._dropped = plan.dropped + self._dropped
        return [
            self._finish(self._sequences[sequence_id], FinishReason.ERROR, error=error)
            for sequence_id in plan.num_scheduled_tokens
        ]

    def snapshot(self) -> SchedulerStats:
        """A copy of the counters, with the sizes as they are."""
        pool = self.manager.pool
        return self.stats.snapshot(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=pool.num_blocks,
            num_held_blocks=pool.num_blocks - pool.num_free,
        )

    def load(self) -> EngineLoad:
        """What there is to do. A walk over all sequences."""
        num_uncached = num_pairs = 0
        for sequence in self._sequences.values():
            if sequence.parent is None:
                num_done = sequence.num_computed_tokens or sequence.num_expected_tokens
                num_left = sequence.num_tokens - num_done
                if num_left > 1:
                    num_uncached += num_left
                    num_pairs += num_left * num_done + num_left**2 // 2
        pool, num_groups = self.manager.pool, self.manager.num_groups
        return EngineLoad(
            num_uncached_tokens=num_uncached,
            num_uncached_pairs=num_pairs,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=pool.num_free // num_groups,
            num_empty_blocks=pool.num_empty // num_groups,
        )

    def shape_of(self, plan: SchedulerOutput) -> StepShape:
        """What a plan that has not been run yet computes."""
        num_tokens, num_pairs, num_decodes = 0, 0.0, 0
        for sequence_id, count in plan.num_scheduled_tokens.items():
            sequence = self._sequences[sequence_id]
            if count == 1 and sequence.num_output_tokens:
                num_decodes += 1
            else:
                num_tokens += count
                num_pairs += count * (sequence.num_computed_tokens + count / 2)
        return StepShape(num_tokens, num_pairs, num_decodes)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless queues, states and blocks agree."""
        self.manager.check_integrity()
        self._waiting.check_integrity()
        if self.num_waiting + self.num_running != len(self._sequences):
            raise IntegrityError("a sequence is in no queue or in two")
        if self._running != sorted(self._running, key=_ORDER) or len(self._running) > self.config.max_num_seqs:
            raise IntegrityError("the running queue is out of order or too long")
        for sequence in self._running:
            table = self.manager.table(sequence)
            if sequence.state is not SequenceState.RUNNING or sequence.num_computed_tokens >= sequence.num_tokens:
                raise IntegrityError(f"{sequence.sequence_id} runs with nothing to compute")
            if min(map(len, table.groups)) * self.manager.block_size < sequence.num_computed_tokens:
                raise IntegrityError(f"{sequence.sequence_id} has computed more tokens than its blocks hold")
        if not self._sequences and self.manager.pool.num_free != self.manager.pool.num_blocks:
            raise IntegrityError("blocks are held while there is no request")

    # -- one step, in its order ------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Preempt one for a waiting sequence of better priority, or of a tenant that holds less than its share.

        Returns whether it was for a share: then there is room for one, at once.
        """
        head = self._waiting.peek()
        if head is None or not self._running or self._excludes(head):
            return False
        is_full = len(self._running) >= self.config.max_num_seqs
        if head.request.priority < self._running[-1].request.priority:
            if not self._must_wait(head) and (is_full or not self._fits(head)):
                self._preempt(newest_of_largest(self._running, _num_tokens))
        elif is_full or self._is_refused(head):
            return self._make_room_for_share(head.request.priority, is_full=is_full)
        return False

    def _make_room_for_share(self, priority: int, *, is_full: bool) -> bool:
        turns = self._waiting.turns_of(priority)
        if len(turns.accounts) < 2 or not turns.num_running:
            return False
        if sum(s.num_tokens - s.num_computed_tokens for s in self._running) >= self.config.max_num_batched_tokens:
            return False  # nobody could be admitted yet
        running = [sequence for sequence in self._running if sequence.request.priority == priority]
        if is_full:
            capacity = float(len(running))
        else:
            num_free = self.manager.pool.num_free // self.manager.num_groups
            capacity = sum(map(_num_tokens, running)) + float(num_free * self.manager.block_size)
        swap = swap_for_share(
            turns,
            running,
            capacity=capacity,
            size=_one if is_full else _num_tokens,
            may_start=lambda sequence: not (self._must_wait(sequence) or self._excludes(sequence)),
        )
        if swap is None:
            return False
        self._waiting.claim(priority, swap.account)
        self._preempt(swap.victim)
        return True

    def _fits(self, sequence: Sequence) -> bool:
        if sequence.parent is not None and self.manager.can_fork(sequence.parent, sequence):
            return self.manager.fits_fork(sequence)
        return self.manager.fits(sequence, self.manager.lookup(sequence))

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        """Decodes first, then prompts in chunks. Returns what is left of the budget."""
        scheduled = plan.num_scheduled_tokens
        block_size = self.manager.block_size
        if self.manager.has_windows:
            self._extend_windows(budget)
        for sequence in tuple(self._running):  # before anything is published, since anybody may have to go
            num_computed = sequence.num_computed_tokens
            if len(sequence.token_ids) - num_computed == 1 and sequence.state is SequenceState.RUNNING:
                self._extend(sequence, num_computed + 1)
        prefilling = []
        for sequence in self._running:
            num_computed = sequence.num_computed_tokens
            if len(sequence.token_ids) - num_computed > 1:
                prefilling.append(sequence)
                continue
            if (num_computed + 1) % block_size == 0:
                self.manager.seal(sequence, num_computed + 1)
            scheduled[sequence.sequence_id] = 1
            budget -= 1
        for sequence in prefilling:
            if budget > 0:
                budget -= self._schedule_chunk(plan, sequence, budget)
        return budget

    def _extend_windows(self, budget: int) -> None:
        """Make room for the chunks of prompts that this step may compute, before anything is scheduled.

        Where all layers see everything, a prompt has its blocks since it was admitted. A window gives up as many as it
        takes, unless others have found them in the cache and hold them too.
        """
        for sequence in tuple(self._running):
            num_left = sequence.num_tokens - sequence.num_computed_tokens
            if num_left > 1 and sequence.state is SequenceState.RUNNING:
                self._extend(sequence, sequence.num_computed_tokens + min(num_left, budget))

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Make room for the first `num_tokens`, preempting others for it or, if it is its turn, the sequence itself."""
        while sequence.state is SequenceState.RUNNING and not self.manager.extend(sequence, num_tokens):
            self._preempt(newest_of_largest(self._running, _num_tokens))

    def _schedule_chunk(self, plan: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        plan.num_scheduled_tokens[sequence.sequence_id] = num_tokens
        self.manager.seal(sequence, sequence.num_computed_tokens + num_tokens)
        return num_tokens

    def _admit(self, plan: SchedulerOutput, budget: int, *, most: int) -> None:
        """Start waiting sequences in order while blocks, slots and budget last, at `most` so many."""
        limit = self.config.max_num_seqs
        while budget > 0 and len(plan.new) < most and len(self._running) < limit and self._waiting.num_passed < limit:
            sequence = self._waiting.peek()
            if sequence is None:
                break
            if self._excludes(sequence):
                break
            if self._must_wait(sequence):
                self._waiting.pass_over()
                continue
            if self._is_refused(sequence):
                break
            if self._takes_spare_place(sequence):
                if not self._waiting.claim_for_others(sequence, lambda other: not self._takes_spare_place(other)):
                    break
                continue
            num_shared = self._start(plan, sequence)
            if num_shared is None:
                self._refused = (sequence.sequence_id, self.manager.pool.num_free, self._step)
                break
            self._waiting.pop(self._expected_cost(sequence))
            self._run(plan, sequence, num_shared)
            budget -= self._schedule_chunk(plan, sequence, budget)
        self._waiting.restore()

    def _takes_spare_place(self, sequence: Sequence) -> bool:
        turns, limit = self._waiting.turns_of(sequence.request.priority), self.config.max_num_seqs
        return takes_spare_place(turns, sequence, num_running=len(self._running), capacity=limit)

    def _is_refused(self, sequence: Sequence) -> bool:
        """Whether it did not fit some steps ago, with as many blocks. To look a long prompt up takes milliseconds.

        It may fit now if others have computed what it begins with; so it is looked up again now and then.
        """
        if self._refused is None or self._refused[0] != sequence.sequence_id:
            return False
        _, num_free, step = self._refused
        return self.manager.pool.num_free <= num_free and self._step < step + _RETRY_STEPS

    def _excludes(self, sequence: Sequence) -> bool:
        """Whether it may not run beside what runs: one of them runs alone."""
        if not self._running or (running := self._running[0].request) is sequence.request:
            return False
        return running.runs_alone or sequence.request.runs_alone

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether a sample's parent has yet to compute the prompt that they share."""
        parent = sequence.parent
        if parent is None:
            return False
        if parent.state is SequenceState.FINISHED:
            sequence.parent = None
            return False
        # What the parent found in the cache as it started may be computed in the same step: too late to copy.
        return parent.num_computed_tokens < sequence.num_prompt_tokens or parent.start_step == self._step

    def _start(self, plan: SchedulerOutput, sequence: Sequence) -> int | None:
        """Give the sequence its blocks. Returns how many tokens of them are shared; None if they do not fit."""
        block_size = self.manager.block_size
        if sequence.parent is not None and not self.manager.can_fork(sequence.parent, sequence):
            sequence.parent = None  # it has gone on so far that a window has left the end of the prompt behind
        if sequence.parent is not None:
            copies = self.manager.fork(sequence.parent, sequence)
            if copies is None:
                return None
            plan.block_copies += copies
            num_found = sequence.num_prompt_tokens
            num_shared = num_found - num_found % block_size
            sequence.parent = None
        else:
            hit = self.manager.lookup(sequence)
            if not self.manager.admit(sequence, hit):
                return None
            num_found = num_shared = hit.num_blocks * block_size
            if sequence.num_preemptions == 0:
                num_hit_tokens = min(num_found, sequence.num_prompt_tokens, sequence.num_tokens - 1)
                self.stats.count_lookup(num_hit_tokens, self.manager.misses(sequence, hit, num_hit_tokens))
        # The last token is always computed: its logits are what the next one is sampled from.
        sequence.num_computed_tokens = min(num_found, sequence.num_tokens - 1)
        return num_shared

    def _run(self, plan: SchedulerOutput, sequence: Sequence, num_shared_tokens: int) -> None:
        sequence.state = SequenceState.RUNNING
        sequence.start_step = self._step
        insort(self._running, sequence, key=_ORDER)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.stats.count_start(sequence.num_prompt_tokens, sequence.num_cached_tokens)
        plan.new.append(sequence.start(self.manager.table(sequence).block_ids, num_shared_tokens))

    # -- ends and queues -------------------------------------------------------------------------

    def _expected_cost(self, sequence: Sequence) -> float:
        """Tokens that a sequence which starts now computes, those that it computed before it was preempted included."""
        num_cached = sequence.num_computed_tokens if sequence.num_preemptions == 0 else sequence.num_cached_tokens
        num_left = self._expected.tokens(sequence.request.tenant, sequence.max_tokens) - sequence.num_output_tokens
        return sequence.num_tokens - num_cached + max(1.0, num_left)

    def _preempt(self, sequence: Sequence) -> None:
        self.stats.count_preemption(sequence.num_computed_tokens)
        sequence.num_preemptions += 1
        self._stop_running(sequence, cost=0)  # it is charged once it is done, and not for what is done twice
        sequence.num_computed_tokens = 0
        sequence.state = SequenceState.WAITING
        self._waiting.push(sequence)

    def _is_untouched(self, sequence: Sequence) -> bool:
        """Whether nothing was ever done for its request, here or by another worker."""
        return not sequence.request.progress and all(
            sample.state is SequenceState.WAITING and sample.num_preemptions == 0
            for sample in self._requests[sequence.request.request_id]
        )

    def _end_request(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> list[SequenceOutput]:
        """What is left of a sequence's request."""
        return [
            self._finish(sample, reason, error=error)
            for sample in self._requests[sequence.request.request_id]
            if sample.state is not SequenceState.FINISHED
        ]

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str | None = None,
    ) -> SequenceOutput:
        """The only way a sequence ends. Returns its last output, for an end without a token."""
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence, cost=max(1, sequence.num_computed_tokens - sequence.num_cached_tokens))
        else:
            self._waiting.discard(sequence)
        self._expected.ended(sequence.request.tenant, sequence.num_output_tokens)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        self.stats.num_finished += 1
        self.stats.num_output_tokens += sequence.num_output_tokens
        del self._sequences[sequence.sequence_id]
        samples = self._requests[sequence.request.request_id]
        if all(sample.state is SequenceState.FINISHED for sample in samples):
            del self._requests[sequence.request.request_id]
        return sequence.output((), error=error)

    def _stop_running(self, sequence: Sequence, *, cost: float) -> None:
        self.manager.free(sequence)
        self._running.remove(sequence)
        self._waiting.settle(sequence, cost)
        self._dropped.append(sequence.sequence_id)


def _one(_: Sequence) -> float:
    return 1.0


def _num_tokens(sequence: Sequence) -> float:
    return float(len(sequence.token_ids))
