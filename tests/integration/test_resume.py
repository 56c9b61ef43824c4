"""A request whose worker is lost goes on at another one, over real gRPC; what its client gets is as if nothing was."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mortal_workers import DEADLINE_S, PROMPT, Calls, Cluster, cluster, collect, request, shown, take
from tiny_model import write_tiny_model

from pagoda.cluster.ingress import resuming_client
from pagoda.cluster.ingress.generation import RequestAbortedError
from pagoda.cluster.ingress.progress import MAX_DEATHS_TOGETHER, PoisonousRequestError, RequestProgress
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.sessions import WorkerLostError
from pagoda.worker import server as worker_server
from pagoda.worker.config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda.worker.errors import InvalidRequestError, OverloadedError
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import FinishReason, Request, RequestId, SampleProgress, SamplingParams, SequenceOutput

NUM_TOKENS = 300
POISON = RequestId("poison")


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops cuts its sessions at once, as when its process dies."""
    monkeypatch.setattr(worker_server, "_STOP_GRACE_S", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def real(model: Path) -> EngineConfig:
    """Computes; in float32, so that the same comes out however it is batched."""
    return EngineConfig(
        model,
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_num_waiting=4),
    )


@pytest.fixture(scope="module")
def fake(real: EngineConfig) -> EngineConfig:
    return replace(real, fake_step_s=0.002, num_threads=None)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=11)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, n=3, top_p=0.9),
        replace(GREEDY, presence_penalty=0.7, frequency_penalty=0.4),
        replace(SAMPLED, repetition_penalty=1.2, top_k=20, min_p=0.01),
        replace(GREEDY, logprobs=2),
        replace(SAMPLED, n=2, logprobs=1, prompt_logprobs=1),
        replace(GREEDY, min_tokens=NUM_TOKENS - 20, stop_token_ids=tuple(range(100)), ignore_eos=False),
    ],
    ids=["greedy", "sampled", "n", "penalties", "filters", "logprobs", "prompt logprobs", "stops"],
)
async def test_same_outputs_as_if_no_worker_had_died(real: EngineConfig, sampling: SamplingParams) -> None:
    """Two workers die, one after the other: tokens, log probabilities, ends and usage are those of a quiet run."""
    async with cluster(real, 1) as quiet:
        expected = await collect(quiet, request(sampling))
    async with cluster(real, 3) as it:
        found = await collect(it, request(sampling), kills_at=[20, 60])
        assert len(it.calls.requests) == 3
        assert it.losses == [True, True]
        await it.until_idle()
    assert shown(found) == shown(expected)


async def test_drawn_seed_goes_along(fake: EngineConfig) -> None:
    """Without one in the request, the next worker would draw another one, and say something else from there on."""
    async with cluster(fake) as it:
        await collect(it, request(replace(SAMPLED, seed=None)), kills_at=[20])
        one, other = it.calls.requests
    assert 0 <= one.waited_s < other.waited_s, "what it has waited goes along too"
    assert one.sampling.seed is not None
    assert one.sampling.seed == other.sampling.seed


async def test_sample_that_ended_is_not_run_again(fake: EngineConfig) -> None:
    """The reader has found the end of one of two samples when their worker dies."""
    async with cluster(fake) as it:
        asked = request(replace(SAMPLED, n=2))
        outputs: dict[int, SequenceOutput] = {}
        async with asyncio.timeout(DEADLINE_S), aclosing(it.client.stream(asked)) as batches:
            async for batch in batches:
                if not outputs:
                    it.client.complete_sample(asked.request_id, 1)
                    await it.workers[0].kill()
                take(outputs, batch)
        assert it.calls.requests[1].live_samples == (0,)
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert len(outputs[0].token_ids) == NUM_TOKENS


async def test_nothing_is_run_again_for_a_reader_that_has_all(fake: EngineConfig) -> None:
    async with cluster(fake) as it:
        asked = request(SAMPLED)
        async with asyncio.timeout(DEADLINE_S), aclosing(it.client.stream(asked)) as batches:
            async for _ in batches:
                it.client.complete_sample(asked.request_id, 0)
                await it.workers[0].kill()
        assert len(it.calls.requests) == 1


async def test_text_is_unbroken(fake: EngineConfig, model: Path) -> None:
    """Characters of several bytes and stop strings may lie across the death."""
    async with cluster(fake, 1) as quiet:
        texts = [await text_of(quiet, model)]
    async with cluster(fake, 3) as it:
        texts.append(await text_of(it, model, kills=2))
        assert len(it.calls.requests) == 3
    assert texts[0] == texts[1]


async def text_of(it: Cluster, model: Path, kills: int = 0) -> str:
    service = InferenceService(Tokenizer(model), it.client, it.workers[0].engine.limits)
    text = ""
    try:
        generation = service.generate(PROMPT, SAMPLED)
        async with asyncio.timeout(DEADLINE_S), aclosing(generation.outputs) as pieces:
            async for batch in pieces:
                text += "".join(piece.text for piece in batch)
                if len(it.calls.requests) <= kills:
                    await it.workers[len(it.calls.requests) - 1].kill()
    finally:
        service.close()
    return text


async def test_worker_that_stops_in_good_order_is_no_end_either(fake: EngineConfig) -> None:
    """Its engine ends what runs with "the worker stopped": others go on with it."""
    async with cluster(fake, 1) as quiet:
        expected = await collect(quiet, request(GREEDY))
    async with cluster(fake) as it:
        outputs: dict[int, SequenceOutput] = {}
        async with asyncio.timeout(DEADLINE_S), aclosing(it.client.stream(request(GREEDY))) as batches:
            async for batch in batches:
                if not outputs:
                    await asyncio.to_thread(it.workers[0].engine.shutdown)
                take(outputs, batch)
    assert shown(outputs) == shown(expected)


async def test_step_that_fails_is_no_end_either(fake: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: a device error in one step. The worker goes on; what the step computed is computed elsewhere."""
    async with cluster(fake, 1) as quiet:
        expected = await collect(quiet, request(GREEDY))
    async with cluster(fake) as it:
        executor: Any = it.workers[0].engine._engine._executor
        outputs: dict[int, SequenceOutput] = {}
        async with asyncio.timeout(DEADLINE_S), aclosing(it.client.stream(request(GREEDY))) as batches:
            async for batch in batches:
                if not outputs:
                    monkeypatch.setattr(executor, "execute", broken)
                take(outputs, batch)
        assert len(it.calls.requests) == 2
    assert shown(outputs) == shown(expected)


def broken(_: object) -> None:
    raise RuntimeError("device error")


async def test_worker_that_lies_is_as_good_as_lost(fake: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said before is kept; the rest is another worker's."""
    async with cluster(fake, 1) as quiet:
        expected = await collect(quiet, request(GREEDY))
    async with cluster(fake) as it:
        liar: Any = it.workers[0].engine
        deliver = liar._deliver

        def lie(outputs: list[SequenceOutput]) -> None:
            deliver([replace(output, token_ids=(10**6,)) for output in outputs])

        outputs: dict[int, SequenceOutput] = {}
        async with asyncio.timeout(DEADLINE_S), aclosing(it.client.stream(request(GREEDY))) as batches:
            async for batch in batches:
                if not outputs:
                    monkeypatch.setattr(liar, "_deliver", lie)
                take(outputs, batch)
        assert len(it.calls.requests) == 2
    assert shown(outputs) == shown(expected)


async def test_full_worker_takes_what_another_one_had_taken(fake: EngineConfig) -> None:
    """The cluster has accepted it; a new request is refused at the same time."""
    async with cluster(fake) as it:
        it.calls.workers = [it.workers[0], *[it.workers[1]] * 100]
        stream = it.client.stream(request(SAMPLED))
        await anext(stream)
        busy = [it.client.stream(request(replace(SAMPLED, n=4), f"busy{i}")) for i in range(3)]
        firsts = [asyncio.create_task(anext(each)) for each in busy]
        async with asyncio.timeout(DEADLINE_S):
            while not it.workers[1].engine.stats().num_waiting:
                await asyncio.sleep(0.002)
        with pytest.raises(OverloadedError):
            await anext(it.client.stream(request(SAMPLED, "new")))
        await it.workers[0].kill()
        async with asyncio.timeout(DEADLINE_S):
            end = [output.finish_reason async for batch in stream for output in batch][-1]
        assert end is FinishReason.LENGTH
        await asyncio.gather(*firsts)
        await asyncio.gather(*(each.aclose() for each in busy))
        await it.until_idle()


async def test_each_worker_gets_what_is_left_of_the_time(fake: EngineConfig) -> None:
    """Its time began once, however many workers it takes; and when it is over, that is its end, and no loss."""
    async with cluster(fake) as it:
        limited = replace(request(SAMPLED), timeout_s=20.0)
        async with aclosing(it.client.stream(limited)) as stream:
            await anext(stream)
            await it.workers[0].kill()
            async with asyncio.timeout(DEADLINE_S):
                async for _ in stream:
                    pass
        first_s, second_s = (each.timeout_s or 0 for each in it.calls.requests)
        assert 0 < second_s < first_s <= 20
        short = replace(request(SAMPLED, "short"), timeout_s=0.05)
        it.calls.workers = it.workers[1:]
        async with asyncio.timeout(DEADLINE_S):
            end = [output.finish_reason async for batch in it.client.stream(short) for output in batch][-1]
        assert end is FinishReason.DEADLINE
        assert len(it.calls.requests) == 3


class PoisonedCalls(Calls):
    """Workers die of one request, as soon as its ingress knows that they run it."""

    def __init__(self, it: Cluster) -> None:
        super().__init__(it.workers)
        self.has_heard = lambda _: it.client._live[POISON].progress._is_on_worker

    async def run(self, request: Request, ranked: tuple[str, ...]) -> None:
        if request.request_id.partition("~")[0] != POISON:
            await super().run(request, ranked)
            return
        worker = next(worker for worker in self.workers if not worker.is_dying)
        self.requests.append(request)
        running = asyncio.ensure_future(worker.server.run_request(request, "front"))
        await until(lambda: self.has_heard(request))
        await worker.kill()
        running.cancel()
        raise WorkerLostError("it died")


async def test_request_that_kills_its_workers_is_stopped(fake: EngineConfig) -> None:
    """After two deaths it runs alone; then it is refused, and the cluster goes on: others lose nothing by it."""
    slow = replace(fake, fake_step_s=0.02)  # nobody gets a token before the worker is dead
    async with cluster(slow, MAX_DEATHS_TOGETHER + 2) as it:
        it.calls = PoisonedCalls(it)
        it.client._calls = it.calls
        with pytest.raises(PoisonousRequestError):
            await collect(it, request(GREEDY, POISON))
        assert [asked.runs_alone for asked in it.calls.requests] == [False] * MAX_DEATHS_TOGETHER + [True]
        assert it.losses == [True] * MAX_DEATHS_TOGETHER + [False]
        it.calls.workers = it.workers[-1:]
        assert len((await collect(it, request(replace(GREEDY, max_tokens=5), "next")))[0].token_ids) == 5


async def test_request_that_waited_behind_the_culprit_goes_on(fake: EngineConfig) -> None:
    """Scenario: it was at two deaths and shall run alone; so shall another one, which kills this worker too."""
    async with cluster(replace(fake, fake_step_s=0.02)) as it:
        it.calls.workers = [it.workers[0], it.workers[0], it.workers[1]]
        culprit = it.client.stream(replace(request(SAMPLED, "culprit"), runs_alone=True))
        await anext(culprit)
        first = it.workers[0]
        innocent = request(replace(GREEDY, max_tokens=5), "innocent")
        stream = it.client.stream(innocent)
        progress = RequestProgress(innocent, first.engine.limits)
        for _ in range(MAX_DEATHS_TOGETHER):
            progress.attempt()
            progress.accept()
            progress.lose_worker(WorkerLostError("it died"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pagoda.cluster.ingress.resuming_client.RequestProgress", lambda *_: progress)
            reading = asyncio.create_task(ends_of(stream))
            await until(lambda: first.engine.stats().num_waiting == 1)
        await first.kill()
        await culprit.aclose()
        assert await asyncio.wait_for(reading, DEADLINE_S) == [FinishReason.LENGTH]
        assert it.calls.requests[-1].runs_alone


async def test_nobody_runs_beside_a_request_that_runs_alone(fake: EngineConfig) -> None:
    async with cluster(fake, 1) as it:
        engine = it.workers[0].engine
        first = asyncio.create_task(collect(it, request(replace(GREEDY, max_tokens=40), "first")))
        await until(lambda: engine.stats().num_running == 1)
        alone = replace(request(replace(GREEDY, n=2, max_tokens=40), "alone"), runs_alone=True)
        second = asyncio.create_task(collect(it, alone))
        await until(lambda: engine.stats().num_waiting == 2)
        third = asyncio.create_task(collect(it, request(replace(GREEDY, max_tokens=40), "third")))
        order: list[str] = []
        for name, task in (("first", first), ("second", second), ("third", third)):
            task.add_done_callback(lambda _, name=name: order.append(name))
        await asyncio.gather(first, second, third)
        assert order == ["first", "second", "third"]


class DeafCalls(Calls):
    """The first worker runs the request, and sends its tokens over a session that nobody reads any more."""

    async def run(self, request: Request, ranked: tuple[str, ...]) -> None:
        if self.requests:
            await super().run(request, ranked)
        self.requests.append(request)


async def test_last_tokens_that_do_not_come_are_lost(real: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: the call of a request ends well, and its tokens went into a connection that a network has swallowed."""
    monkeypatch.setattr(resuming_client, "LAST_TOKENS_S", 0.02)
    async with cluster(real) as it:
        quiet = shown(await collect(it, request(SAMPLED)))
        it.client._calls = DeafCalls(it.workers)
        assert shown(await collect(it, request(SAMPLED))) == quiet
        assert it.losses == [True]


@pytest.mark.parametrize("state", ["asked", "waiting", "running", "between two workers"])
@pytest.mark.parametrize("signal", ["abort", "closed", "cancelled"])
async def test_given_up_in_every_state(fake: EngineConfig, state: str, signal: str) -> None:
    """Whoever gives it up, and however often: it ends, it is not resumed, and nothing is left of it."""
    async with cluster(replace(fake, scheduler=replace(fake.scheduler, max_num_seqs=1))) as it:
        engine = it.workers[0].engine
        asked = request(replace(SAMPLED, max_tokens=400))
        if state == "waiting":
            it.calls.workers = it.workers[:1]
            busy = it.client.stream(request(SAMPLED, "busy"))
            await anext(busy)
        elif state == "between two workers":
            it.calls.workers = [it.workers[0], NoWorker(), NoWorker()]  # type: ignore[list-item]
        stream = it.client.stream(asked)
        reading = asyncio.create_task(anext(stream))
        if state == "asked":
            await asyncio.sleep(0)
        elif state == "waiting":
            await until(lambda: engine.stats().num_waiting == 1)
        else:
            await reading
        if state == "between two workers":
            reading = asyncio.create_task(read_all(stream))
            await it.workers[0].kill()
            await until(lambda: len(it.calls.requests) > 1)
        elif state == "running":
            reading = asyncio.create_task(read_all(stream))
            await asyncio.sleep(0)
        if signal == "abort":
            it.client.abort(asked.request_id)
            it.client.abort(asked.request_id)
            with pytest.raises(RequestAbortedError):
                await asyncio.wait_for(reading, DEADLINE_S)
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        it.client.abort(asked.request_id)  # late
        if state == "waiting":
            await busy.aclose()
        num_tries = len(it.calls.requests)
        await it.until_idle()
        assert len(it.calls.requests) == num_tries
        assert it.client.num_live == 0


async def test_aborted_by_name_after_it_was_resumed(fake: EngineConfig) -> None:
    """Through another ingress, which knows the name that its client was told, and not how often it was tried."""
    async with cluster(fake) as it:
        stream = it.client.stream(request(replace(SAMPLED, max_tokens=400)))
        await anext(stream)
        await it.workers[0].kill()
        reading = asyncio.create_task(ends_of(stream))
        await until(lambda: bool(it.workers[1].engine.live_requests))
        it.workers[1].engine.abort(RequestId("another"))
        it.workers[1].engine.abort(RequestId("r"))
        assert await asyncio.wait_for(reading, DEADLINE_S) == [FinishReason.ABORT]


async def ends_of(stream: AsyncIterator[list[SequenceOutput]]) -> list[FinishReason]:
    return [output.finish_reason async for batch in stream for output in batch if output.finish_reason]


async def read_all(stream: AsyncIterator[list[SequenceOutput]]) -> None:
    async for _ in stream:
        pass


class NoWorker:
    """Takes the call and does nothing, as a router does that knows no worker."""

    def __init__(self) -> None:
        self.is_dying = False
        self.death = asyncio.Event()
        self.server = self

    async def run_request(self, *_: object) -> None:
        await asyncio.Event().wait()


async def test_request_of_nobody_is_swept_away(fake: EngineConfig) -> None:
    """Scenario: its client goes while it waits for its turn, and Serve forgets to cancel its call."""
    one_at_a_time = replace(fake, scheduler=replace(fake.scheduler, max_num_seqs=1))
    async with cluster(one_at_a_time, 1, owned_period_s=0.02) as it:
        busy = it.client.stream(request(replace(SAMPLED, max_tokens=400), "busy"))
        await anext(busy)
        left_behind = asyncio.create_task(it.workers[0].server.run_request(request(SAMPLED, "left behind"), "front"))
        await asyncio.wait_for(left_behind, DEADLINE_S)
        assert not (await anext(busy))[0].finish_reason
        await busy.aclose()


async def test_bad_progress_is_refused(fake: EngineConfig) -> None:
    """A worker trusts no more than that: what cannot be gone on with is refused by name."""
    asked = request(replace(GREEDY, n=2))
    all_of_it = SampleProgress(tuple(range(NUM_TOKENS)))
    ended = SampleProgress(has_ended=True)
    async with cluster(fake, 1) as it:
        for progress in [(ended,), (ended, ended), (all_of_it, ended), (SampleProgress((10**6,)), ended)]:
            with pytest.raises(InvalidRequestError, match="progress"):
                await it.workers[0].engine.run(replace(asked, progress=progress), lambda _: None)


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)
