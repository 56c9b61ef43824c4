"""Sixteen modelled workers under a directory, from half their capacity to saturation: affinity and balance at once."""

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from pagoda.cluster.directory.state import DirectoryState
from pagoda.cluster.directory.worker_record import WorkerRecord
from pagoda.proto import directory_pb2 as pb

NUM_WORKERS, BLOCK_SIZE = 16, 16
PREFILL_S = 1e-3
"""For each token."""
NUM_GROUPS, PREFIX_BLOCKS, OWN_BLOCKS = 40, 40, 10
"""Prompts are one of so many beginnings and something of their own."""
NUM_REQUESTS = 1200
REPORT_S = 0.05


@dataclass
class Worker:
    """Computes prompts one after the other, and holds what it has computed."""

    name: str
    record: WorkerRecord
    held: set[bytes] = field(default_factory=set)
    queue: deque[tuple[str, list[bytes], int]] = field(default_factory=deque)
    """(request, its blocks, tokens left to compute)"""
    admitted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    seq: int = 0
    num_cached: int = 0

    @property
    def backlog_s(self) -> float:
        return sum(left for *_, left in self.queue) * PREFILL_S

    def take(self, request_id: str, hashes: list[bytes]) -> None:
        expected = self.held.union(*(set(blocks) for _, blocks, _ in self.queue))
        num_found = next((index for index, block in enumerate(hashes) if block not in expected), len(hashes))
        self.num_cached += num_found * BLOCK_SIZE
        self.queue.append((request_id, hashes, (len(hashes) - num_found) * BLOCK_SIZE + 1))
        self.admitted.append(request_id)

    def compute(self, seconds: float) -> list[bytes]:
        """The blocks that are new after so much time."""
        budget, new = seconds / PREFILL_S, []
        while self.queue and budget > 0:
            request_id, hashes, left = self.queue.popleft()
            if left > budget:
                self.queue.appendleft((request_id, hashes, int(left - budget)))
                break
            budget -= left
            new += [block for block in hashes if block not in self.held]
            self.held.update(hashes)
            self.finished.append(request_id)
        return new


@pytest.mark.parametrize("load", [0.5, 0.8, 1.0])
def test_nobody_has_more_than_its_share_by_more_than_one_request(load: float) -> None:
    """At every placement, in seconds of work; while most of what could be found in caches is found."""
    draw = random.Random(3)
    state = DirectoryState("d", now_s=0.0, draw=draw.random, lease_s=1e9)
    workers = {}
    for number in range(NUM_WORKERS):
        hello = pb.Hello(
            worker_id=f"w{number}", epoch=1, model="m", block_size=BLOCK_SIZE, windows=[0], num_blocks=100_000,
            max_num_seqs=256,
        )  # fmt: skip
        record, _, _ = state.workers.hello(hello, 0.0)
        workers[f"w{number}"] = Worker(f"w{number}", record)
    beginnings = [[draw.randbytes(16) for _ in range(PREFIX_BLOCKS)] for _ in range(NUM_GROUPS)]
    weights = [1 / (rank + 1) for rank in range(NUM_GROUPS)]
    one_request_s = ((PREFIX_BLOCKS + OWN_BLOCKS) * BLOCK_SIZE + 1) * PREFILL_S
    mean_s = (OWN_BLOCKS * BLOCK_SIZE + 1) * PREFILL_S
    arrivals = itertools.accumulate(draw.expovariate(load * NUM_WORKERS / mean_s) for _ in range(NUM_REQUESTS))
    events = [(at_s, number) for number, at_s in enumerate(arrivals)]
    last_s = events[-1][0]
    events += [(step * REPORT_S, -1) for step in range(int(last_s / REPORT_S))]
    heapq.heapify(events)
    reported_s = 0.0
    while events:
        now_s, number = heapq.heappop(events)
        if number < 0:
            for worker in workers.values():
                report(state, worker, worker.compute(now_s - reported_s), now_s)
            reported_s = now_s
            continue
        hashes = draw.choices(beginnings, weights)[0] + [draw.randbytes(16) for _ in range(OWN_BLOCKS)]
        request = pb.PlaceRequest(
            request_id=str(number), model="m", hashes=b"".join(hashes), num_tokens=len(hashes) * BLOCK_SIZE + 1
        )
        backlogs = [worker.backlog_s for worker in workers.values()]
        chosen = workers[state.place(request, now_s).ranked[0]]
        assert chosen.backlog_s <= sum(backlogs) / NUM_WORKERS + one_request_s
        chosen.take(str(number), hashes)
    placed = [worker.record.num_placements for worker in workers.values()]
    assert min(placed) > NUM_REQUESTS / NUM_WORKERS / 3
    ideal = (NUM_REQUESTS - NUM_GROUPS) * PREFIX_BLOCKS * BLOCK_SIZE
    assert sum(worker.num_cached for worker in workers.values()) > 0.6 * ideal


def report(state: DirectoryState, worker: Worker, new: list[bytes], now_s: float) -> None:
    if new:
        worker.seq += 1
        event = pb.BlockEvent(stored=pb.Blocks(hashes=b"".join(new)))
        batch = pb.EventBatch(epoch=1, seq=worker.seq, events=[event])
        assert state.workers.update(worker.record, pb.WorkerUpdate(events=batch), now_s) is None
    load = pb.LoadReport(
        num_uncached_tokens=sum(left for *_, left in worker.queue), num_waiting=len(worker.queue),
        num_free_blocks=100_000, num_empty_blocks=100_000, rates=pb.Rates(prefill_s_per_token=PREFILL_S),
        admitted=worker.admitted, finished=worker.finished,
    )  # fmt: skip
    state.workers.update(worker.record, pb.WorkerUpdate(load=load), now_s)
    worker.admitted, worker.finished = [], []
