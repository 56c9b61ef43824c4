"""Scenario "mixed": everything that can be killed is, clients do everything wrong, and nothing grows.

A whole service with fake workers. Requests that nothing of theirs was killed under are answered, and rightly; who was
served by an ingress or proxy that died gets an error at once, and never silence.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bad_clients import BadClients, is_of_the_proxy
from chaos_plan import ChaosPlan, Fault, FaultKind
from fake_load import Case, Oracle
from full_disk import empty, fill, small_disk
from processes import kill, paused
from samples import Samples
from served import Held, ServedCluster, served

from pagoda.cluster.loadtest.grpc_target import GrpcTarget
from pagoda.cluster.loadtest.openai_target import OpenAITarget
from pagoda.cluster.loadtest.records import RequestRecord, record_of
from pagoda.cluster.loadtest.runner import LoadOptions, LoadResult, LoadRunner
from pagoda.cluster.loadtest.target import Answer, LoadRequest, Target
from pagoda.cluster.loadtest.workloads import ChatWorkload
from pagoda.proto import inference_pb2 as pb
from pagoda.worker.models.families import read_model_config
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import SamplingParams

NUM_WORKERS, NUM_INGRESSES, NUM_DIRECTORIES = 3, 2, 2
OPTIONS = (
    "--fake-step-s", "0.02", "--kv-cache-gib", "0.1", "--ingresses", str(NUM_INGRESSES),
    "--directories", str(NUM_DIRECTORIES),
)  # fmt: skip
PERIODS_S = {
    FaultKind.KILL_WORKER: 30.0,
    FaultKind.PAUSE_WORKER: 25.0,
    FaultKind.KILL_DIRECTORY: 45.0,
    FaultKind.KILL_INGRESS: 60.0,
    FaultKind.FILL_DISK: 90.0,
    FaultKind.KILL_PROXY: 150.0,
}
WORKLOAD = ChatWorkload(num_turns=4, system_tokens=100, user_tokens=30, output_tokens=60, pause_s=0.3)
REQUEST_LIMIT_S = 90.0
REST_DEADLINE_S = 60.0
GROWTH_LIMIT = 1.15
DISK_BYTES = 400 * 2**20
_NUM_HTTP, _NUM_GRPC, _NUM_BAD = 6, 3, 3
_EXCUSE_S = {FaultKind.KILL_INGRESS: 15.0, FaultKind.KILL_PROXY: 45.0}
"""So long after such a fault a request may fail, with an error."""
_NO_EXCUSE = ("timeout", "garbage", "client", "http_400", "http_404", "http_500")


@dataclass(frozen=True, slots=True)
class MixedOutcome:
    """What the scenario came to."""

    num_requests: int
    failed: list[str]
    excused: Counter[str]
    """Errors of requests whose ingress or proxy was killed, by kind."""
    wrong: list[str]
    bad: BadClients
    num_faults: Counter[str]
    samples: Samples
    held: Held

    def growth(self) -> dict[str, float]:
        return {
            "rss_growth_ratio": round(self.samples.growth_ratio(lambda usage: usage.rss_bytes), 3),
            "files_growth_ratio": round(self.samples.growth_ratio(lambda usage: usage.num_files), 3),
            "threads_growth_ratio": round(self.samples.growth_ratio(lambda usage: usage.num_threads), 3),
        }

    @property
    def is_kept(self) -> bool:
        is_flat = max(self.growth().values()) <= GROWTH_LIMIT
        return not (self.failed or self.wrong or self.bad.problems) and self.held.is_nothing and is_flat

    def figures(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "failed_requests": len(self.failed),
            "clean_errors": sum(self.excused.values()),
            "wrong_outputs": len(self.wrong),
            "num_bad_clients": sum(self.bad.num_sent.values()),
            "bad_answers": len(self.bad.problems),
            "num_faults": sum(self.num_faults.values()),
            "num_kills": sum(count for kind, count in self.num_faults.items() if kind.startswith("kill")),
            "leaked_blocks": self.held.num_blocks,
            "leaked_sequences": self.held.num_sequences,
            "leaked_reservations": self.held.num_reservations,
            **self.growth(),
        }


async def run_mixed_chaos(
    model: Path,
    model_name: str,
    plan: ChaosPlan,
    *,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
) -> MixedOutcome:
    """Do what the plan says to a service under load; then let it rest and look what is left."""
    with ExitStack() as stack:
        disk, environment = None, {}
        try:
            place = Path(f"/tmp/c{os.getpid() % 10_000}")  # short, as it is in the names of HAProxy's sockets
            disk = stack.enter_context(small_disk(place, size_bytes=DISK_BYTES))
            environment = {"RAY_TMPDIR": str(disk), "TMPDIR": str(disk)}
        except PermissionError as error:
            say(f"no disk will be full: {error}")
        async with served(
            model_name, *OPTIONS, num_workers=NUM_WORKERS, log=folder / "chaos_mixed.log", environment=environment
        ) as service:
            return await _mistreat(service, model, plan, disk, folder, say)


async def _mistreat(
    service: ServedCluster, model: Path, plan: ChaosPlan, disk: Path | None, folder: Path, say: Callable[[str], None]
) -> MixedOutcome:
    samples, bad = Samples(), BadClients(service.url, service.grpc_address, service.model, plan.seed, say)
    breaker = _Breaker(service, disk, say)
    sampling = asyncio.create_task(samples.take(service))
    clients = asyncio.create_task(bad.run(_NUM_BAD))
    breaking = asyncio.create_task(breaker.run(plan.faults))
    telling = asyncio.create_task(_tell(service, bad, say))
    try:
        results = await _put_load_on(service, plan)
        await breaking
        bad.is_stopping = True
        await clients
    finally:
        telling.cancel()
        sampling.cancel()
        breaking.cancel()
        clients.cancel()
        await asyncio.gather(telling, sampling, breaking, clients, return_exceptions=True)
        breaker.heal()
    held = await service.held_after_rest(NUM_WORKERS, deadline_s=REST_DEADLINE_S)
    failed, excused = judge([record for result in results for record in result.records], breaker.done)
    oracle = _ChatOracle(model)
    wrong = [problem for result in results for problem in oracle.wrong(result)]
    for problem in (*failed[:20], *wrong[:20]):
        say(f"PROBLEM {problem}")
    samples.plot(folder / "chaos.svg", [(at_s, str(fault.kind)) for at_s, fault in breaker.done])
    return MixedOutcome(
        sum(len(result.records) for result in results), failed, excused, wrong, bad,
        Counter(str(fault.kind) for _, fault in breaker.done), samples, held,
    )  # fmt: skip


async def _put_load_on(service: ServedCluster, plan: ChaosPlan) -> list[LoadResult]:
    """Conversations by HTTP and by gRPC, for as long as the plan."""
    fields = {"temperature": 0.0, "ignore_eos": True}
    by_grpc = pb.Sampling(temperature=0.0, ignore_eos=True)
    targets: list[tuple[Target, int]] = [
        (OpenAITarget(service.url, model=service.model, timeout_s=REQUEST_LIMIT_S, fields=fields), _NUM_HTTP),
        (
            GrpcTarget(service.grpc_address, model=service.model, timeout_s=REQUEST_LIMIT_S, sampling=by_grpc),
            _NUM_GRPC,
        ),
    ]

    async def load(target: Target, concurrency: int, seed: int) -> LoadResult:
        options = LoadOptions(duration_s=plan.duration_s, concurrency=concurrency, seed=seed)
        try:
            return await LoadRunner(WORKLOAD, target, options).run()
        finally:
            await target.close()

    return await asyncio.gather(
        *(load(target, concurrency, plan.seed + place) for place, (target, concurrency) in enumerate(targets))
    )


def judge(records: Iterable[RequestRecord], faults: Iterable[tuple[float, Fault]]) -> tuple[list[str], Counter[str]]:
    """Which requests have failed, and the errors, by kind, of those under which an ingress or a proxy was killed."""
    failed: list[str] = []
    excused: Counter[str] = Counter()
    excuses = [(at_s, at_s + _EXCUSE_S[fault.kind]) for at_s, fault in faults if fault.kind in _EXCUSE_S]
    for record in records:
        if record.error is None:
            continue
        is_excused = any(record.sent_s <= end_s and record.end_s >= begin_s for begin_s, end_s in excuses)
        if is_excused and (record.error not in _NO_EXCUSE or is_of_the_proxy(record.detail)):
            excused[record.error] += 1
        else:
            failed.append(f"{record.sent_s:.1f} to {record.end_s:.1f} s: {record.error}: {record.detail}")
    return failed, excused


class _ChatOracle:
    """What fake workers say to conversations."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer(model)
        self._oracle = Oracle(self._tokenizer, read_model_config(model).vocab_size)

    def wrong(self, result: LoadResult) -> list[str]:
        """Answers that are not what they must be."""
        return [
            f"session {record.session}, turn {record.turn}: not what the fake model says"
            for record in result.records
            if record.error is None and record.text_digest != self._digest(result.requests[record.session, record.turn])
        ]

    def _digest(self, request: LoadRequest) -> str:
        prompt = tuple(self._tokenizer.encode_chat(list(request.messages)))
        sampling = SamplingParams(temperature=0.0, max_tokens=request.max_tokens)
        (answer,) = self._oracle.answers(Case(0, prompt, sampling))
        record = record_of(request, Answer(text=[answer.text]), 0, 0, intended_s=0.0, sent_s=0.0, end_s=0.0, error=None)
        return record.text_digest


class _Breaker:
    """Does what a plan says to a service."""

    def __init__(self, service: ServedCluster, disk: Path | None, say: Callable[[str], None]) -> None:
        self._service = service
        self._disk = disk
        self._say = say
        self._lasting: set[asyncio.Task[None]] = set()
        self.done: list[tuple[float, Fault]] = []
        """What was done, and when in truth."""

    async def run(self, faults: Iterable[Fault]) -> None:
        begin_s = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, begin_s + fault.at_s - time.monotonic()))
            at_s = time.monotonic() - begin_s
            if self._do(fault):
                self.done.append((at_s, fault))
                self._say(f"{at_s:5.0f} s: {fault.kind}")
        await asyncio.gather(*self._lasting)

    def heal(self) -> None:
        for task in self._lasting:
            task.cancel()
        if self._disk is not None:
            empty(self._disk)

    def _do(self, fault: Fault) -> bool:
        """Whether there was somebody to do it to."""
        match fault.kind:
            case FaultKind.KILL_WORKER | FaultKind.KILL_INGRESS | FaultKind.KILL_DIRECTORY | FaultKind.KILL_PROXY:
                victims = self._service.processes(fault.kind.removeprefix("kill-"))
                return bool(victims) and kill(fault.victim(victims))
            case FaultKind.PAUSE_WORKER:
                if victims := self._service.processes("worker"):
                    self._last(self._pause(fault.victim(victims), 4 * fault.amount))
                return bool(victims)
            case FaultKind.FILL_DISK if self._disk is not None:
                self._last(self._fill(self._disk, 2 + 6 * fault.amount))
                return True
        return False

    def _last(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    @staticmethod
    async def _pause(process: int, duration_s: float) -> None:
        with paused(process):
            await asyncio.sleep(duration_s)

    @staticmethod
    async def _fill(disk: Path, duration_s: float) -> None:
        await asyncio.to_thread(fill, disk)
        try:
            await asyncio.sleep(duration_s)
        finally:
            empty(disk)


async def _tell(service: ServedCluster, bad: BadClients, say: Callable[[str], None]) -> None:
    begin_s = time.monotonic()
    while True:
        await asyncio.sleep(15.0)
        usage = service.usage()["all"]
        say(
            f"{time.monotonic() - begin_s:5.0f} s: {len(service.processes('worker'))} workers, "
            f"{usage.rss_bytes / 2**20:.0f} MiB, {usage.num_files} files, {usage.num_threads} threads, "
            f"{sum(bad.num_sent.values())} bad clients, {len(bad.problems)} bad answers"
        )
