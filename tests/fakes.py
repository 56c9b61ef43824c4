"""Stand-ins for the parts of a replica that compute, and a replica stepped by hand."""

import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pagoda.worker.block_hash import BlockHash, HashChain, HashDomain
from pagoda.worker.block_pool import BlockKey, BlockPool
from pagoda.worker.config import EngineLimits, SchedulerConfig
from pagoda.worker.deadlines import TimeLimits
from pagoda.worker.engine import check_progress
from pagoda.worker.kv_events import AllBlocksCleared, BlockStored, KVEventLog
from pagoda.worker.kv_manager import KVManager
from pagoda.worker.kv_spec import KVCacheGroup, KVCacheSpec
from pagoda.worker.scheduler import Scheduler
from pagoda.worker.scheduler_stats import SchedulerStats
from pagoda.worker.types import (
    FinishReason,
    ModelRunnerOutput,
    NewSequence,
    Request,
    RequestId,
    SampleProgress,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
    TokenLogprobs,
)

Failure = Literal["before it began", "half-way"]
SlotContent = tuple[bytes | None, tuple[int, ...]]
"""What a slot's KV depends on: whose it is, and all tokens up to the slot's own."""


class StepFailedError(Exception):
    """A fake executor was told to fail."""


def request_id_of(sequence_id: SequenceId) -> RequestId:
    return RequestId(sequence_id.rpartition("/")[0])


def hash_chain(salt: bytes, *, block_size: int = 4, num_public_tokens: int = 0) -> HashChain:
    return HashDomain(b"weights", "", "float32", "", block_size).chain(salt, num_public_tokens=num_public_tokens)


def hash_root(salt: bytes) -> BlockHash:
    return hash_chain(salt).root


def sample(sampling: SamplingParams, seed: int, token_ids: Sequence[int], vocab_size: int) -> int:
    """The next token: a pure function of what it may depend on."""
    seed = seed if sampling.temperature > 0 else 0
    return zlib.crc32(repr((seed, tuple(token_ids))).encode()) % vocab_size


def logprobs_of(token_ids: Sequence[int]) -> TokenLogprobs:
    """Of the last of these tokens, given those before it: a pure function of all of them."""
    return TokenLogprobs(token_ids[-1], -float(len(token_ids)), zlib.crc32(repr(tuple(token_ids)).encode()), ())


def generate(
    prompt: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    *,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
) -> tuple[list[int], FinishReason]:
    """What one sample must get, whatever runs beside it: the specification of how sequences grow and end."""
    output: list[int] = []
    while True:
        token = sample(sampling, seed, [*prompt, *output], vocab_size)
        may_stop = len(output) >= sampling.min_tokens
        output.append(token)
        is_end = (token in eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if may_stop and is_end:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, FinishReason.LENGTH


@dataclass(slots=True)
class RankSequence:
    """What a rank keeps of a sequence."""

    token_ids: list[int]
    num_computed_tokens: int
    num_shared_tokens: int
    block_tables: list[list[int]]
    sampling: SamplingParams
    seed: int
    salt: bytes | None
    num_public_tokens: int
    num_prompt_tokens: int
    next_prompt_logprob: int


class FakeExecutor:
    """A rank without tensors. It does exactly what a plan says, with slots that hold what their KV would depend on.

    Each computed token must find, in every slot up to its own that its window does not hide, the content that belongs
    there. So a stale, foreign or overwritten block is an `AssertionError` in the step that reads it.
    """

    def __init__(self, *, block_size: int, vocab_size: int = 64, windows: Sequence[int] = (0,)) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.vocab_size = vocab_size
        self.failures: deque[Failure | Exception | None] = deque()
        """What the next steps do; steps beyond its end succeed."""
        self.salts: dict[RequestId, bytes | None] = {}
        """Of requests that have one; None of those that share with nobody."""
        self.num_public_tokens: dict[RequestId, int] = {}
        """Tokens that requests begin with and share whatever their salts."""
        self.sequences: dict[SequenceId, RankSequence] = {}
        self.seeds: dict[SequenceId, int] = {}
        """The seed each sequence was first run with."""
        self.num_shutdowns = 0
        self._slots: dict[tuple[int, int], SlotContent] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        failure = self.failures.popleft() if self.failures else None
        if failure == "before it began":
            raise StepFailedError(failure)
        if isinstance(failure, Exception):
            raise failure
        self._take_changes(plan)
        self._write(plan, garbage=failure is not None)
        if failure is not None:
            raise StepFailedError(failure)
        self._check_reads(plan)
        result = ModelRunnerOutput({})
        self._advance(plan, result)
        return result

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _take_changes(self, plan: SchedulerOutput) -> None:
        for sequence_id in plan.dropped:
            self.sequences.pop(sequence_id, None)
        for new in plan.new:
            self._add(new)
        for sequence_id, group, index, block_id in plan.block_updates:
            table = self.sequences[sequence_id].block_tables[group]
            assert index <= len(table), f"{sequence_id} gets block {index} while it has {len(table)}"
            table[index : index + 1] = [block_id]
        before = dict(self._slots)
        for source, destination in plan.block_copies:
            for offset in range(self.block_size):
                self._slots[destination, offset] = before.get((source, offset), (None, ()))

    def _add(self, new: NewSequence) -> None:
        assert new.sequence_id not in self.sequences, f"{new.sequence_id} is new twice"
        assert self.seeds.setdefault(new.sequence_id, new.seed) == new.seed
        assert 0 <= new.num_computed_tokens < len(new.token_ids), "a new sequence computes at least its last token"
        assert new.num_shared_tokens % self.block_size == 0
        for window, table in zip(self.windows, new.block_tables, strict=True):
            if not window:
                assert len(table) * self.block_size >= len(new.token_ids), "a sequence gets blocks for all its tokens"
                assert len(set(table)) == len(table)
        self.sequences[new.sequence_id] = RankSequence(
            list(new.token_ids),
            new.num_computed_tokens,
            new.num_shared_tokens,
            [list(table) for table in new.block_tables],
            new.sampling,
            new.seed,
            self.salts.get(request_id_of(new.sequence_id), b""),
            self.num_public_tokens.get(request_id_of(new.sequence_id), 0),
            len(new.token_ids) - new.num_output_tokens,
            new.next_prompt_logprob,
        )

    def _write(self, plan: SchedulerOutput, *, garbage: bool) -> None:
        """Write the scheduled tokens, each block by one sequence, which no sequence that ran before it may hold."""
        started = {new.sequence_id for new in plan.new}
        holders: dict[int, set[SequenceId]] = {}
        for sequence_id, sequence in self.sequences.items():
            for window, table in zip(self.windows, sequence.block_tables, strict=True):
                seen_from = max(0, sequence.num_computed_tokens - window + 1) // self.block_size if window else 0
                for block_id in table[seen_from:]:
                    holders.setdefault(block_id, set()).add(sequence_id)
        writers: dict[int, SequenceId] = {}
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self.sequences[sequence_id]
            end = sequence.num_computed_tokens + num_tokens
            assert 0 < num_tokens <= len(sequence.token_ids) - sequence.num_computed_tokens
            for position in range(max(sequence.num_computed_tokens, sequence.num_shared_tokens), end):
                content = (None, ()) if garbage else self._content(sequence, position)
                for _, (block_id, offset) in self._slots_of(sequence, position):
                    assert writers.setdefault(block_id, sequence_id) == sequence_id, "two write to one block"
                    assert holders[block_id] - started <= {sequence_id}, "written while another sequence reads it"
                    self._slots[block_id, offset] = content

    def _check_reads(self, plan: SchedulerOutput) -> None:
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self.sequences[sequence_id]
            for position in range(sequence.num_computed_tokens + num_tokens):
                expected = self._content(sequence, position)
                for window, slot in self._slots_of(sequence, position):
                    if window and position <= sequence.num_computed_tokens - window:
                        continue  # no query of this step sees it
                    found = self._slots.get(slot)
                    assert found == expected, f"{sequence_id} finds {found} at position {position}, not {expected}"

    def _advance(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self.sequences[sequence_id]
            end = min(sequence.num_computed_tokens + num_tokens + 1, sequence.num_prompt_tokens)
            owed = range(max(sequence.next_prompt_logprob, sequence.num_computed_tokens + 1), end)
            if owed:
                assert owed.start == sequence.next_prompt_logprob, "a token that owes its log probability was skipped"
                sequence.next_prompt_logprob = owed.stop
                result.prompt_logprobs[sequence_id] = tuple(logprobs_of(sequence.token_ids[: i + 1]) for i in owed)
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens == len(sequence.token_ids):
                token = sample(sequence.sampling, sequence.seed, sequence.token_ids, self.vocab_size)
                sequence.token_ids.append(token)
                result.sampled[sequence_id] = token
                if sequence.sampling.logprobs is not None:
                    result.logprobs[sequence_id] = logprobs_of(sequence.token_ids)

    def _content(self, sequence: RankSequence, position: int) -> SlotContent:
        """What the position's slot must hold: in a block that is public as a whole, nobody's own."""
        end_of_block = (position // self.block_size + 1) * self.block_size
        is_public = sequence.salt is not None and end_of_block <= sequence.num_public_tokens
        return b"" if is_public else sequence.salt, tuple(sequence.token_ids[: position + 1])

    def _slots_of(self, sequence: RankSequence, position: int) -> list[tuple[int, tuple[int, int]]]:
        """Of each group, its window and where it has the position."""
        index, offset = divmod(position, self.block_size)
        tables = zip(self.windows, sequence.block_tables, strict=True)
        return [(window, (table[index], offset)) for window, table in tables]


class Replica:
    """A scheduler with its KV manager, pool and a fake rank, stepped by hand and checked after each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        windows: Sequence[int] = (0,),
        max_num_seqs: int = 8,
        max_num_waiting: int = 4096,
        max_num_batched_tokens: int = 64,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        vocab_size: int = 64,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        groups = tuple(KVCacheGroup((layer,), window) for layer, window in enumerate(windows))
        spec = KVCacheSpec(groups, block_size, num_kv_heads=1, head_size=1, dtype_bytes=1)
        pool_len = spec.num_tokens_in(num_blocks, max_step_tokens=max_num_batched_tokens)
        longest = min(max_model_len or num_blocks * block_size, pool_len)
        self.limits = EngineLimits(longest, vocab_size, max_num_seqs, max_num_waiting)
        self.windows = tuple(windows)
        self.log = KVEventLog(range(len(windows)))
        self.announced: set[BlockKey] = set()
        """What somebody who hears the events of all steps believes to be cached."""
        self.pool = BlockPool(num_blocks, self.log)
        self.manager = KVManager(
            self.pool,
            windows=windows,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            max_step_tokens=max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            self.limits,
            self.manager,
            eos_token_ids=frozenset(eos_token_ids),
        )
        self.rank = FakeExecutor(block_size=block_size, vocab_size=vocab_size, windows=windows)
        self.requests: dict[RequestId, Request] = {}
        self.chains: dict[RequestId, HashChain | None] = {}
        self.tokens: dict[SequenceId, list[int]] = {}
        """What each sequence has got so far."""
        self.logprobs: dict[SequenceId, list[TokenLogprobs]] = {}
        """Those of the prompt and of the output, as they came."""
        self.ends: dict[SequenceId, SequenceOutput] = {}
        """The last output of each sequence that ended."""
        self.is_cache_cleared = False

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.snapshot()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        salt: bytes | None = b"",
        num_public_tokens: int = 0,
        seed: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        deadline_s: float | None = None,
        limits: TimeLimits | None = None,
        **sampling: object,
    ) -> None:
        """Queue a request, by default greedy. Salt None keeps it out of the prefix cache."""
        request_id = RequestId(name)
        params = SamplingParams(**({"temperature": 0.0} | sampling))
        if params.prompt_logprobs is not None:
            salt = None  # as the engine does
        request = Request(
            request_id,
            tuple(prompt),
            params,
            priority=priority,
            salt=salt or b"",
            num_public_tokens=num_public_tokens,
            tenant=tenant,
            weight=weight,
        )
        chain = (
            None
            if salt is None
            else hash_chain(salt, block_size=self.manager.block_size, num_public_tokens=num_public_tokens)
        )
        if request_id in self.requests:
            self._forget(request_id)
        self.requests[request_id] = request
        self.rank.salts[request_id] = salt
        self.rank.num_public_tokens[request_id] = num_public_tokens
        self.chains[request_id] = chain
        self.logprobs |= {SequenceId(f"{name}/{index}"): [] for index in range(params.n)}
        self.tokens |= {SequenceId(f"{name}/{index}"): [] for index in range(params.n)}
        if deadline_s is not None:
            limits = TimeLimits(end_by_s=deadline_s)
        self.scheduler.add(request, seed=seed, hash_chain=chain, limits=limits)

    def abort(self, name: str) -> list[SequenceOutput]:
        outputs = self.scheduler.abort(RequestId(name))
        assert all(output.finish_reason is FinishReason.ABORT for output in outputs)
        self._take(outputs)
        return outputs

    def resume(self, name: str, num_received: int, *, seed: int, runs_alone: bool = False) -> None:
        """Go on with a request whose samples have ended, as a worker that has never heard of it would.

        Those that were aborted or failed are as good as lost with another worker: of what each of them got,
        `num_received` tokens, or all if there are not so many, have reached whoever asks to go on.
        """
        request = self.requests[RequestId(name)]
        progress, num_told = [], 0
        for index in range(request.sampling.n):
            sequence_id = SequenceId(f"{name}/{index}")
            tokens, logprobs = self.tokens[sequence_id], self.logprobs[sequence_id]
            has_ended = self.ends[sequence_id].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if not has_ended:
                num_lost = len(tokens[num_received:])
                del tokens[num_received:], self.ends[sequence_id]
                if request.sampling.logprobs is not None and num_lost:
                    del logprobs[-num_lost:]
            if index == 0:
                num_told = len(logprobs) - (0 if request.sampling.logprobs is None else len(tokens))
            progress.append(SampleProgress(tuple(tokens), has_ended))
        resumed = replace(request, progress=tuple(progress), num_told_prompt_logprobs=num_told, runs_alone=runs_alone)
        check_progress(resumed, self.limits)
        self.scheduler.add(resumed, seed=seed, hash_chain=self.chains[RequestId(name)])

    def step(self, failure: Failure | None = None) -> SchedulerOutput:
        """Run one step and return its plan."""
        num_preemptions = self.stats.num_preemptions
        plan = self.scheduler.schedule()
        if num_preempted := self.stats.num_preemptions - num_preemptions:
            # Unless that one makes room for it, within the tenants' shares.
            assert len(plan.new) <= (num_preempted == 1), "a step that preempts admits nobody"
            assert not {new.sequence_id for new in plan.new} & {*plan.dropped}
        running = {request_id_of(sequence_id) for sequence_id in plan.num_scheduled_tokens}
        if any(self.scheduler._requests[request_id][0].request.runs_alone for request_id in running):
            assert len(running) == 1, "something runs beside a request that runs alone"
        # A failed step may end before any rank has heard of its plan: then whoever runs must end with it.
        assert len(plan.num_scheduled_tokens) == self.scheduler.num_running
        assert sum(plan.num_scheduled_tokens.values()) <= self.scheduler.config.max_num_batched_tokens
        self.rank.failures.append(failure)
        try:
            result = self.rank.execute(plan)
        except StepFailedError as error:
            outputs = self.scheduler.fail(plan, str(error))
            assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] * len(plan.num_scheduled_tokens)
        else:
            outputs = self.scheduler.update(plan, result)
        self._take(outputs)
        self.check()
        return plan

    def run(self, max_steps: int = 1000) -> None:
        """Step until every request has ended and the rank has heard of it."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), f"not done after {max_steps} steps"
        self.step()
        assert not self.rank.sequences
        assert self.pool.num_free == self.pool.num_blocks

    def output(self, name: str, index: int = 0) -> list[int]:
        return self.tokens[SequenceId(f"{name}/{index}")]

    def end(self, name: str, index: int = 0) -> SequenceOutput:
        """The last output of a sequence that has ended."""
        return self.ends[SequenceId(f"{name}/{index}")]

    def check(self) -> None:
        """Bookkeeping agrees, and what is cached of each prompt is a prefix of it: tails are evicted first."""
        self.scheduler.check_integrity()
        for event in self.log.take():
            if isinstance(event, AllBlocksCleared):
                self.announced.clear()
                continue
            keys = {BlockKey(block_hash, event.group) for block_hash in event.hashes}
            self.announced = self.announced | keys if isinstance(event, BlockStored) else self.announced - keys
        assert self.announced == set(self.pool._index)
        load = self.scheduler.load()
        assert (load.num_uncached_tokens == 0) or self.scheduler.has_work()
        if self.is_cache_cleared:
            return
        for sequence_id, tokens in self.tokens.items():
            request = self.requests[request_id_of(sequence_id)]
            chain = self.chains[request.request_id]
            if chain is None:
                continue
            hashes = chain.blocks([*request.prompt_token_ids, *tokens], self.manager.block_size)
            for group, window in enumerate(self.windows):
                if window:
                    continue
                cached = [self.pool.lookup(BlockKey(block_hash, group)) is not None for block_hash in hashes]
                assert cached == sorted(cached, reverse=True), f"of {sequence_id} is cached: {cached}"

    def check_outputs(self) -> None:
        """Every sequence has got what it would get alone; all of it, unless it was aborted or failed."""
        for sequence_id, tokens in self.tokens.items():
            request = self.requests[request_id_of(sequence_id)]
            if sequence_id not in self.rank.seeds:
                assert not tokens
                continue
            expected, reason = generate(
                request.prompt_token_ids,
                request.sampling,
                self.rank.seeds[sequence_id],
                max_model_len=self.limits.max_model_len,
                vocab_size=self.limits.vocab_size,
                eos_token_ids=self.scheduler.eos_token_ids,
            )
            self._check_logprobs(sequence_id, request)
            end = self.ends.get(sequence_id)
            if end is not None and end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (tokens, end.finish_reason) == (expected, reason)
            else:
                assert tokens == expected[: len(tokens)]
                assert len(tokens) < len(expected)

    def _check_logprobs(self, sequence_id: SequenceId, request: Request) -> None:
        """Each asked for came exactly once and in order: the prompt's with the first sample, the output's with each."""
        prompt, output = list(request.prompt_token_ids), self.tokens[sequence_id]
        expected = []
        if request.sampling.prompt_logprobs is not None and sequence_id.endswith("/0"):
            expected += [logprobs_of(prompt[: i + 1]) for i in range(1, len(prompt))]
        if request.sampling.logprobs is not None:
            expected += [logprobs_of([*prompt, *output[: i + 1]]) for i in range(len(output))]
        came = self.logprobs[sequence_id]
        assert came == expected[: len(came)]
        assert came == expected or not output

    def _forget(self, request_id: RequestId) -> None:
        """An ended request's id is used again: check what the request got, for the last time."""
        self.check_outputs()
        for sequence_id in [i for i in self.tokens if request_id_of(i) == request_id]:
            del self.tokens[sequence_id], self.ends[sequence_id]
            self.rank.seeds.pop(sequence_id, None)

    def _take(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            sequence_id = SequenceId(f"{output.request_id}/{output.index}")
            assert sequence_id not in self.ends, f"{sequence_id} gets something after its end"
            self.tokens[sequence_id] += output.token_ids
            self.logprobs[sequence_id] += (*output.prompt_logprobs, *output.logprobs)
            if output.finish_reason is not None:
                self.ends[sequence_id] = output
