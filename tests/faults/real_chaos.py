"""Scenario "real": workers of a real model die under conversations, and every answer is the one of a quiet run.

First the run with the kills, then the very same requests with none: so every answer has one to be compared with.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from processes import kill
from served import Held, ServedCluster, served

from pagoda.cluster.loadtest.grpc_target import GrpcTarget
from pagoda.cluster.loadtest.openai_target import OpenAITarget
from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.runner import LoadOptions, LoadRunner
from pagoda.cluster.loadtest.target import Target
from pagoda.cluster.loadtest.workloads import ChatWorkload
from pagoda.proto import inference_pb2 as pb

NUM_WORKERS = 3
OPTIONS = ("--dtype", "float32", "--threads", "1", "--kv-cache-gib", "0.3")
WORKLOAD = ChatWorkload(num_turns=4, system_tokens=100, user_tokens=30, output_tokens=40, pause_s=0.5)
REQUEST_LIMIT_S = 120.0
REST_DEADLINE_S = 60.0
_LONGEST_S = 1e6


@dataclass(frozen=True, slots=True)
class Stream:
    """One of the loads that run beside each other."""

    name: str
    seed: int
    concurrency: int
    temperature: float = 0.0
    by_grpc: bool = False

    def target(self, service: ServedCluster) -> Target:
        if self.by_grpc:
            sampling = pb.Sampling(temperature=self.temperature, ignore_eos=True)
            return GrpcTarget(service.grpc_address, model=service.model, timeout_s=REQUEST_LIMIT_S, sampling=sampling)
        fields = {"temperature": self.temperature, "ignore_eos": True}
        return OpenAITarget(service.url, model=service.model, timeout_s=REQUEST_LIMIT_S, fields=fields)


STREAMS = (
    Stream("greedy", 1, 2),
    Stream("sampled", 2, 2, temperature=0.8),
    Stream("greedy_grpc", 3, 1, by_grpc=True),
    Stream("sampled_grpc", 4, 1, temperature=0.8, by_grpc=True),
)
Answers = dict[str, dict[tuple[int, int], RequestRecord]]


@dataclass(frozen=True, slots=True)
class RealOutcome:
    """What the scenario came to."""

    disturbed: Answers
    quiet: Answers
    num_kills: int
    replace_s: list[float]
    """How long each replacement took to be ready."""
    held: Held

    def failed(self) -> list[str]:
        """Requests of either run that were not answered."""
        return [
            f"{name} {key}: {record.error}: {record.detail}"
            for answers in (self.disturbed, self.quiet)
            for name, records in answers.items()
            for key, record in records.items()
            if record.error is not None
        ]

    def wrong(self) -> list[str]:
        """Answers that are not those of the quiet run."""
        return [
            f"{name} {key}: {record.text_digest} instead of {other.text_digest}"
            for name, records in self.disturbed.items()
            for key, record in records.items()
            if record.error is None
            and (other := self.quiet[name].get(key)) is not None
            and (record.text_digest, record.prompt_digest) != (other.text_digest, other.prompt_digest)
        ]

    def uncompared(self) -> int:
        """Answers that the quiet run has no equal of; none, unless that one failed."""
        return sum(len(records.keys() - self.quiet[name].keys()) for name, records in self.disturbed.items())

    @property
    def is_kept(self) -> bool:
        return not (self.failed() or self.wrong() or self.uncompared()) and self.held.is_nothing

    def figures(self) -> dict[str, Any]:
        return {
            "num_requests": sum(map(len, self.disturbed.values())),
            "num_tokens": sum(r.num_output_tokens for records in self.disturbed.values() for r in records.values()),
            "num_kills": self.num_kills,
            "failed_requests": len(self.failed()),
            "wrong_outputs": len(self.wrong()),
            "uncompared_outputs": self.uncompared(),
            "slowest_replacement_s": round(max(self.replace_s, default=0.0), 1),
            "longest_gap_s": round(
                max(gap for records in self.disturbed.values() for r in records.values() for gap in r.gaps_s), 1
            ),
            "leaked_blocks": self.held.num_blocks,
            "leaked_sequences": self.held.num_sequences,
            "leaked_reservations": self.held.num_reservations,
        }


async def run_real_chaos(
    model: str,
    *,
    seed: int,
    duration_s: float,
    pause_s: float,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
) -> RealOutcome:
    """Kill a worker, wait until the next one is ready and then for `pause_s`, and again, for `duration_s`."""
    async with served(model, *OPTIONS, num_workers=NUM_WORKERS, log=folder / "chaos_real.log") as service:
        say(f"{NUM_WORKERS} workers, {sum(stream.concurrency for stream in STREAMS)} conversations at a time")
        killer = _Killer(service, random.Random(f"{seed} victims"), pause_s, say)
        killing = asyncio.create_task(killer.run(duration_s))
        disturbed = await _ask(service, [LoadOptions(duration_s=duration_s)] * len(STREAMS))
        await killing
        held = await service.held_after_rest(NUM_WORKERS, deadline_s=REST_DEADLINE_S)
        say(f"{killer.num_kills} kills, {sum(map(len, disturbed.values()))} requests; now the same without kills")
        quiet = await _ask(
            service,
            [
                LoadOptions(duration_s=_LONGEST_S, max_sessions=1 + max(session for session, _ in records))
                for records in disturbed.values()
            ],
        )
        outcome = RealOutcome(disturbed, quiet, killer.num_kills, killer.replace_s, held)
        for problem in (*outcome.failed()[:20], *outcome.wrong()[:20]):
            say(f"PROBLEM {problem}")
        return outcome


async def _ask(service: ServedCluster, options: list[LoadOptions]) -> Answers:
    """All streams at once."""

    async def ask(stream: Stream, options: LoadOptions) -> dict[tuple[int, int], RequestRecord]:
        target = stream.target(service)
        own = replace(options, concurrency=stream.concurrency, seed=stream.seed, sampling_seeds=stream.temperature > 0)
        try:
            result = await LoadRunner(WORKLOAD, target, own, keep_requests=False).run()
        finally:
            await target.close()
        return {(record.session, record.turn): record for record in result.records}

    answers = await asyncio.gather(*(ask(stream, each) for stream, each in zip(STREAMS, options, strict=True)))
    return {stream.name: records for stream, records in zip(STREAMS, answers, strict=True)}


class _Killer:
    """One worker after the other."""

    def __init__(self, service: ServedCluster, draw: random.Random, pause_s: float, say: Callable[[str], None]) -> None:
        self._service = service
        self._draw = draw
        self._pause_s = pause_s
        self._say = say
        self.num_kills = 0
        self.replace_s: list[float] = []

    async def run(self, duration_s: float) -> None:
        begin_s = time.monotonic()
        await asyncio.sleep(min(5.0, duration_s / 2))  # by then answers are under way
        while time.monotonic() - begin_s < duration_s:
            before = await self._service.worker_ids()
            victim = self._draw.choice(self._service.processes("worker"))
            kill(victim)
            self.num_kills += 1
            killed_s = time.monotonic()
            await self._until_replaced(before)
            self.replace_s.append(time.monotonic() - killed_s)
            self._say(
                f"{time.monotonic() - begin_s:5.0f} s: killed {victim}, its successor was ready "
                f"after {self.replace_s[-1]:.1f} s"
            )
            await asyncio.sleep(min(self._pause_s, max(0.0, duration_s - (time.monotonic() - begin_s))))

    async def _until_replaced(self, before: set[str]) -> None:
        """There are as many as before, and one of them is new."""
        async with asyncio.timeout(180.0):
            while len(ids := await self._service.worker_ids()) != NUM_WORKERS or not ids - before:
                await asyncio.sleep(0.2)
