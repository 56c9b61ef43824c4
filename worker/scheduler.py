"""Decides what each step computes. Standard library only: no tensors, no clock, no threads.

One step is schedule -> run -> sample -> update:

    plan = scheduler.schedule()          # who runs, with how many tokens, in which blocks
    result = executor.execute(plan)
    outputs = scheduler.update(plan, result)      # or scheduler.fail(plan, error) if execute raised

Rules that hold at all times:

- A sequence is admitted only if all its tokens fit the free blocks, which it then gets (where layers see a window, as
  many as it ever holds at once); so a prompt computed in chunks does not get stuck half-way.
- When decoding needs a block and none is free, the running sequence that goes last (by priority, then arrival) is
  preempted: its blocks are freed, and it computes its tokens again later. A step that preempts admits nobody.
- A sequence that goes first can therefore always run: nobody starves.
- A request that runs alone starts when nothing runs, and nobody else starts before it has ended.
- Nothing is computed twice at the same time: whoever is admitted finds all that running sequences have computed or
  compute in this very step; and nobody is admitted while one of them still has tokens to schedule, since that one
  took what was left of the budget.
"""

from bisect import insort
from operator import attrgetter

from pagoda.worker.block_hash import BlockHash
from pagoda.worker.config import EngineLimits, SchedulerConfig
from pagoda.worker.cost_model import StepShape
from pagoda.worker.engine_load import EngineLoad
from pagoda.worker.errors import IntegrityError
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.sequence import Sequence, SequenceState, samples_of
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

    def add(self, request: Request, *, seed: int, hash_root: BlockHash | None) -> None:
        """Queue a validated request's samples. `hash_root` None keeps it out of the prefix cache."""
        if request.request_id in self._requests:
            raise IntegrityError(f"request {request.request_id} is here already")
        self._arrivals += 1
        samples = samples_of(
            request,
            arrival=self._arrivals,
            seed=seed,
            max_model_len=self.limits.max_model_len,
            eos_token_ids=self.eos_token_ids,
            hash_root=hash_root,
            block_size=self.manager.block_size,
        )
        self._requests[request.request_id] = samples
        samples[0].num_expected_tokens = self.manager.lookup(samples[0]).num_blocks * self.manager.block_size
        for sequence in samples:
            self._sequences[sequence.sequence_id] = sequence
            self._waiting.push(sequence)

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

    def schedule(self) -> SchedulerOutput:
        """Plan one step. The plan may be empty if every waiting sequence waits for blocks."""
        self._step += 1
        plan = SchedulerOutput(step=self._step)
        num_preemptions = self.stats.num_preemptions
        self._make_room_for_urgent()
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if self.stats.num_preemptions == num_preemptions:
            self._admit(plan, budget)
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

    def _make_room_for_urgent(self) -> None:
        """Let a waiting sequence of better priority take the place of the last running one, one per step."""
        head = self._waiting.peek()
        if head is None or not self._running or head.order[0] >= self._running[-1].order[0]:
            return
        if self._excludes(head):
            return
        is_full = len(self._running) >= self.config.max_num_seqs
        if not self._must_wait(head) and (is_full or not self._fits(head)):
            self._preempt(self._running[-1])

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
        prefilling = []
        for sequence in tuple(self._running):
            num_computed = sequence.num_computed_tokens
            if len(sequence.token_ids) - num_computed > 1:
                prefilling.append(sequence)
            elif sequence.state is SequenceState.RUNNING and self._extend(sequence, num_computed + 1):
                if (num_computed + 1) % block_size == 0:
                    self.manager.seal(sequence, num_computed + 1)
                scheduled[sequence.sequence_id] = 1
                budget -= 1
        for sequence in prefilling:
            if budget > 0 and sequence.state is SequenceState.RUNNING:
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

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens`, preempting from the end. False if the sequence itself had to go."""
        while not self.manager.extend(sequence, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _schedule_chunk(self, plan: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        plan.num_scheduled_tokens[sequence.sequence_id] = num_tokens
        self.manager.seal(sequence, sequence.num_computed_tokens + num_tokens)
        return num_tokens

    def _admit(self, plan: SchedulerOutput, budget: int) -> None:
        """Start waiting sequences in order while blocks, slots and budget last."""
        limit = self.config.max_num_seqs
        while budget > 0 and len(self._running) < limit and self._waiting.num_passed < limit:
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
            num_shared = self._start(plan, sequence)
            if num_shared is None:
                self._refused = (sequence.sequence_id, self.manager.pool.num_free, self._step)
                break
            self._waiting.pop()
            self._run(plan, sequence, num_shared)
            budget -= self._schedule_chunk(plan, sequence, budget)
        self._waiting.restore()

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

    def _preempt(self, sequence: Sequence) -> None:
        self.stats.count_preemption(sequence.num_computed_tokens)
        sequence.num_preemptions += 1
        self._stop_running(sequence)
        sequence.num_computed_tokens = 0
        sequence.state = SequenceState.WAITING
        self._waiting.push(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str | None = None,
    ) -> SequenceOutput:
        """The only way a sequence ends. Returns its last output, for an end without a token."""
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        else:
            self._waiting.discard(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        self.stats.num_finished += 1
        self.stats.num_output_tokens += sequence.num_output_tokens
        del self._sequences[sequence.sequence_id]
        samples = self._requests[sequence.request.request_id]
        if all(sample.state is SequenceState.FINISHED for sample in samples):
            del self._requests[sequence.request.request_id]
        return sequence.output((), error=error)

    def _stop_running(self, sequence: Sequence) -> None:
        self.manager.free(sequence)
        self._running.remove(sequence)
        self._dropped.append(sequence.sequence_id)
