"""Random requests, aborts, failures and evictions, on a rank that knows what each slot must hold."""

from fakes import Failure, Replica
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagoda.cluster.public_prefixes import PublicPrefixes
from pagoda.worker.deadlines import Pace
from pagoda.worker.types import FinishReason

NAMES = [f"r{i}" for i in range(12)]
"""Few, so that ids are used again, and turns follow each other."""
TRUNKS = [(0,) * 24, (0, 1) * 12, (0,) * 6 + (1,) * 18]
"""Prompts are a cut of one of these and a short rest: they often share a prefix, or all they have."""
VOCAB_SIZE = 3
MAX_OUTPUT_TOKENS = 12
WEIGHTS = {"": 1.0, "light": 0.5, "heavy": 3.0}
"""Of tenants."""

prompts = st.tuples(
    st.sampled_from(TRUNKS), st.integers(0, 20), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3)
).map(lambda parts: (*parts[0][: parts[1]], *parts[2]))


class SchedulerMachine(RuleBasedStateMachine):
    """The rank checks what it reads and writes, the replica its books, after every step; at the end all is drained."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        windows=st.sampled_from([(0,), (0,), (0, 0), (0, 5), (7,), (0, 4, 9)]),
        num_tokens=st.sampled_from([16, 24, 40, 100]),
        max_num_seqs=st.sampled_from([1, 2, 3, 8]),
        max_num_waiting=st.sampled_from([4, 8, 100]),
        max_num_batched_tokens=st.sampled_from([1, 4, 7, 16, 64]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_declared_tokens=st.sampled_from([0, 5, 8, 24]),
    )
    def start(
        self,
        *,
        block_size: int,
        windows: tuple[int, ...],
        num_tokens: int,
        max_num_seqs: int,
        max_num_waiting: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        num_declared_tokens: int,
    ) -> None:
        self.seeds: dict[str, int] = {}
        self.public_prefixes = PublicPrefixes([TRUNKS[2][:num_declared_tokens]])
        self.replica = Replica(
            num_blocks=num_tokens // block_size * len(windows),
            block_size=block_size,
            windows=windows,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            vocab_size=VOCAB_SIZE,
            eos_token_ids={0},
        )

    @rule(
        name=st.sampled_from(NAMES),
        prompt=prompts,
        turn_after=st.one_of(st.none(), st.sampled_from(NAMES)),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        salt=st.sampled_from([b"", b"", b"tenant", b"tenant", b"other", None]),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.one_of(st.none(), st.integers(1, MAX_OUTPUT_TOKENS)),
        min_tokens=st.sampled_from([0, 0, 4]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (1,)]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        deadline_s=st.sampled_from([None, None, 2.0, 3.0]),
        logprobs=st.sampled_from([None, None, 0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        *,
        name: str,
        prompt: tuple[int, ...],
        turn_after: str | None,
        max_tokens: int | None,
        **options: object,
    ) -> None:
        """Add a request that the engine would accept, unless one of that name still runs.

        It may be the next turn of a chat: after the prompt and the output, so far, of another request.
        """
        if name in self.live:
            return
        if turn_after in self.replica.requests:
            before = self.replica.requests[turn_after].prompt_token_ids
            prompt = (*before, *self.replica.output(turn_after), *prompt[:2])
        prompt = prompt[: self.replica.limits.max_model_len - 1] or (0,)
        room = self.replica.limits.max_model_len - len(prompt)
        max_tokens = None if max_tokens is None else min(max_tokens, room)
        self.seeds[name] = options["seed"]
        options["min_tokens"] = min(options["min_tokens"], room if max_tokens is None else max_tokens)
        weight = WEIGHTS[str(options["tenant"])]
        num_public_tokens = self.public_prefixes.num_public_tokens(prompt)
        self.replica.add(
            name, prompt, max_tokens=max_tokens, weight=weight, num_public_tokens=num_public_tokens, **options
        )

    @rule(name=st.sampled_from(NAMES))
    def abort(self, *, name: str) -> None:
        """Abort a request in whatever state it is, ended and unknown ones too."""
        num_live = self.live.count(name)
        assert len(self.replica.abort(name)) == num_live
        assert self.replica.abort(name) == []

    @rule()
    def shed(self) -> None:
        """Whoever is shed has got nothing; what is left fits, or has begun."""
        replica = self.replica
        outputs = replica.scheduler.shed_excess()
        for output in outputs:
            assert output.finish_reason is FinishReason.SHED
            assert not replica.output(output.request_id, output.index)
        replica._take(outputs)
        replica.check()

    @rule(now_s=st.sampled_from([0.0, 1.0, 2.0, 3.0]), token_s=st.sampled_from([0.0, 0.1]))
    def expire(self, *, now_s: float, token_s: float) -> None:
        """Time may also go back: requests that come later have their time all the same."""
        replica = self.replica
        outputs = replica.scheduler.expire(now_s, Pace(per_prefill_token_s=token_s))
        for output in outputs:
            is_shed = output.finish_reason is FinishReason.SHED
            assert output.finish_reason is FinishReason.DEADLINE or (is_shed and now_s < 3.0)
            assert not (is_shed and replica.output(output.request_id, output.index))
        replica._take(outputs)
        replica.check()

    @rule(name=st.sampled_from(NAMES), num_received=st.integers(0, MAX_OUTPUT_TOKENS), runs_alone=st.booleans())
    def lose_and_resume(self, *, name: str, num_received: int, runs_alone: bool) -> None:
        """Its worker dies; another one, played by the same replica, goes on from what has reached its client."""
        if name in self.replica.requests:
            self.replica.abort(name)
            ends = [end for sequence, end in self.replica.ends.items() if sequence.partition("/")[0] == name]
            if any(end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) for end in ends):
                self.replica.resume(name, num_received, seed=self.seeds[name], runs_alone=runs_alone)

    @rule(num_steps=st.integers(1, 8))
    def step(self, *, num_steps: int) -> None:
        for _ in range(num_steps):
            self.replica.step()

    @rule(failure=st.sampled_from(["before it began", "half-way"]))
    def failed_step(self, *, failure: Failure) -> None:
        self.replica.step(failure)

    @precondition(lambda self: self.replica.pool.num_cached)
    @rule()
    def clear_cache(self) -> None:
        self.replica.pool.clear_cache()
        self.replica.is_cache_cleared = True

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        # The first in order gets a token or more in each step, and may first wait for blocks that others compute.
        longest = replica.limits.max_model_len
        replica.run(max_steps=10 + 3 * longest * len(self.live))
        assert replica.ends.keys() == replica.tokens.keys()
        replica.check_outputs()

    @property
    def live(self) -> list[str]:
        """The name of each sequence that has not ended."""
        return [sequence_id.partition("/")[0] for sequence_id in self.replica.tokens.keys() - self.replica.ends.keys()]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)
