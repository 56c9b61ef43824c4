"""Requests of all kinds for fake workers, and what each must be answered: the fake model is a pure function.

Nothing here depends on what happens to the cluster: the n-th request of a seed is the same in every run.
"""

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from zlib import crc32

from pagoda.cluster.ingress.generation import Generation, TextOutput
from pagoda.cluster.ingress.service import InferenceService
from pagoda.worker.detokenizer import Detokenizer
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.fake_runner import FakeRunner
from pagoda.worker.sequence import _SEED_MASK, _SEED_STRIDE
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import FinishReason, SamplingParams, TokenLogprobs

FIRST_TOKEN_ID = 300
LONG_TOKENS, SHORT_TOKENS = (60, 160), (1, 40)
_NUM_TOPICS = 24
_HURRY_S = 0.2
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and how its client behaves."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    leaves_after: int | None = None
    """Outputs after which the client goes away; None reads to the end."""
    gives_up_s: float | None = None
    """Seconds after which it goes away."""
    pauses_s: float = 0.0
    """That it takes for each output: a slow reader."""
    is_bad: bool = False
    """It must be refused."""


@dataclass(slots=True)
class SampleAnswer:
    """One sample, as a client has it at the end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: TextOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


class Cases:
    """All requests of a seed."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def case(self, number: int) -> Case:
        """The n-th. Prompts go on from one of a few beginnings, so that there is something to be found in caches."""
        draw = random.Random(f"{self._seed} case {number}")
        topic = random.Random(f"{self._seed} topic {draw.randrange(_NUM_TOPICS)}")
        prompt = [topic.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(topic.randrange(20, 200))]
        prompt += [draw.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(draw.randrange(1, 60))]
        sampling = self._sampling(draw)
        behaviour = draw.random()
        return Case(
            number,
            tuple(prompt),
            SamplingParams(temperature=0, max_tokens=10**6) if behaviour < 0.02 else sampling,
            leaves_after=draw.randrange(20) if 0.02 <= behaviour < 0.08 else None,
            gives_up_s=draw.random() * _HURRY_S if 0.08 <= behaviour < 0.12 else None,
            pauses_s=0.05 * draw.random() if 0.12 <= behaviour < 0.16 else 0.0,
            is_bad=behaviour < 0.02,
        )

    @staticmethod
    def _sampling(draw: random.Random) -> SamplingParams:
        is_greedy = draw.random() < 0.5
        kind = draw.random()
        return SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            seed=None if is_greedy and draw.random() < 0.5 else draw.randrange(2**63),
            max_tokens=draw.randint(*(LONG_TOKENS if draw.random() < 0.6 else SHORT_TOKENS)),
            n=draw.randint(2, 4) if kind < 0.15 else 1,
            logprobs=draw.randrange(4) if 0.15 <= kind < 0.35 else None,
            prompt_logprobs=draw.randrange(3) if 0.25 <= kind < 0.35 else None,
            stop=tuple(draw.choice("etaoinshr") + draw.choice("etaoinshr") for _ in range(2)) if kind > 0.75 else (),
            include_stop_str_in_output=kind > 0.9,
        )


class Oracle:
    """What the fake model says, without a worker."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._runner = FakeRunner(step_s=0.0, vocab_size=vocab_size)

    def answers(self, case: Case) -> list[SampleAnswer]:
        """One for each sample."""
        return [self._answer(case, index) for index in range(case.sampling.n)]

    def _answer(self, case: Case, index: int) -> SampleAnswer:
        sampling = case.sampling
        seed = 0 if sampling.temperature == 0 else ((sampling.seed or 0) + index * _SEED_STRIDE) & _SEED_MASK
        detokenizer = Detokenizer(
            self._tokenizer.text_decoder(skip_special_tokens=True),
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
        )
        answer, state = SampleAnswer(), crc32(array("q", case.prompt), seed % 2**32)
        if sampling.prompt_logprobs is not None and index == 0:
            answer.prompt_logprobs = self._prompt_logprobs(case, seed % 2**32)
        for _ in range(sampling.max_tokens or 0):
            token = self._runner._guess(state)
            if sampling.logprobs is not None:
                answer.logprobs.append(self._runner._logprobs(token, state, sampling.logprobs))
            answer.token_ids.append(token)
            state = crc32(array("q", [token]), state)
            answer.text += detokenizer.push([token])
            if detokenizer.stopped_by is not None:
                answer.finish_reason, answer.stop_reason = FinishReason.STOP, detokenizer.stopped_by
                return answer
        answer.text += detokenizer.push([], is_last=True)
        is_stopped = detokenizer.stopped_by is not None
        answer.finish_reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        answer.stop_reason = detokenizer.stopped_by
        return answer

    def _prompt_logprobs(self, case: Case, seed: int) -> list[TokenLogprobs]:
        state, told = crc32(array("q", case.prompt[:1]), seed), []
        for token in case.prompt[1:]:
            told.append(self._runner._logprobs(token, state, case.sampling.prompt_logprobs or 0))
            state = crc32(array("q", [token]), state)
        return told


@dataclass(slots=True)
class LoadCounts:
    """What became of the requests."""

    num_requests: int = 0
    num_left: int = 0
    """Of which the client went away, as it was to."""
    num_refused: int = 0
    """Bad ones."""
    num_tokens: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


class FakeLoad:
    """Clients, each with one request after the other, until they are told to stop."""

    def __init__(
        self, service: InferenceService, tokenizer: Tokenizer, seed: int, *, deadline_s: float = 120.0
    ) -> None:
        """A request that takes longer than `deadline_s` has failed."""
        vocab_size = service.limits.vocab_size
        self._service = service
        self._cases = Cases(seed, vocab_size)
        self._oracle = Oracle(tokenizer, vocab_size)
        self._deadline_s = deadline_s
        self._next = 0
        self.counts = LoadCounts()
        self.is_stopping = False

    async def run(self, num_clients: int) -> None:
        """Until `is_stopping`; what has begun is read to its end."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._be_client())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once it is so. Raises `TimeoutError` if that takes as long as a request may."""
        async with asyncio.timeout(self._deadline_s):
            while not condition():
                await asyncio.sleep(_POLL_S)

    async def _be_client(self) -> None:
        while not self.is_stopping:
            case = self._cases.case(self._next)
            self._next += 1
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._ask(case)
            except TimeoutError:
                self.counts.failed.append(f"{case.number}: not answered within {self._deadline_s:g} s")
            except Exception as error:  # noqa: BLE001  (whatever it is, the request has failed)
                self.counts.failed.append(f"{case.number}: {type(error).__name__}: {error}")
                await asyncio.sleep(_POLL_S)  # perhaps it has failed at once, and so will the next one

    async def _ask(self, case: Case) -> None:
        counts = self.counts
        counts.num_requests += 1
        try:
            self._service.check(case.prompt, case.sampling)
        except InvalidRequestError:
            counts.num_refused += 1
            if not case.is_bad:
                raise
            return
        generation = self._service.generate(case.prompt, case.sampling)
        answers = [SampleAnswer() for _ in range(case.sampling.n)]
        try:
            async with asyncio.timeout(case.gives_up_s):
                is_whole = await self._read(case, generation, answers)
        except TimeoutError:
            if case.gives_up_s is None:
                raise
            is_whole = False
        expected = self._oracle.answers(case)
        if is_whole:
            counts.num_tokens += sum(len(answer.token_ids) for answer in answers)
            if answers != expected:
                counts.wrong.append(difference(case, answers, expected))
        else:
            counts.num_left += 1
            if any(a.token_ids != e.token_ids[: len(a.token_ids)] for a, e in zip(answers, expected, strict=True)):
                counts.wrong.append(difference(case, answers, expected))

    @staticmethod
    async def _read(case: Case, generation: Generation, answers: Sequence[SampleAnswer]) -> bool:
        """Whether it was read to the end."""
        num_outputs = 0
        async with aclosing(generation.outputs) as batches:
            async for batch in batches:
                for output in batch:
                    answers[output.index].add(output)
                num_outputs += 1
                if case.leaves_after is not None and num_outputs > case.leaves_after:
                    return False
                if case.pauses_s:
                    await asyncio.sleep(case.pauses_s)
        return True


@asynccontextmanager
async def under_load(service: InferenceService, tokenizer: Tokenizer, *, num_clients: int) -> AsyncIterator[FakeLoad]:
    """Clients ask until the end of the block, and then wait for what they are owed."""
    load = FakeLoad(service, tokenizer, seed=1)
    running = asyncio.create_task(load.run(num_clients))
    try:
        yield load
        load.is_stopping = True
        await running
    finally:
        running.cancel()
        await asyncio.wait({running})


def difference(case: Case, answers: Sequence[SampleAnswer], expected: Sequence[SampleAnswer]) -> str:
    """In what they differ first, for people."""
    for index, (got, wanted) in enumerate(zip(answers, expected, strict=True)):
        for name in SampleAnswer.__slots__:
            if (one := getattr(got, name)) != (other := getattr(wanted, name)):
                return f"{case.number}, sample {index}: {name} is {one!r:.120}, must be {other!r:.120}"
    return f"{case.number}: nothing"
