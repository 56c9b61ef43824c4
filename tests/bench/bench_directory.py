"""The directory under load, with clients in other processes: build/bench/directory.json.

64 workers hold 1 M blocks. Prompts are of 128 blocks, the first half of which a worker holds.

    placements_per_s      `Place` alone, as fast as it goes
    events_per_s          blocks stored and removed, alone
    place_p99_ms          of 500 placements/s beside 100,000 block events/s, from when each was due
    bytes_per_entry       memory of the directory's process, for each block that a worker holds
"""

import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from pagoda.proto import directory_pb2 as pb
from pagoda.proto.directory_pb2_grpc import DirectoryStub

OUTPUT = Path("build/bench/directory.json")
PAGODA = Path(sys.executable).with_name("pagoda")
NUM_WORKERS, NUM_ENTRIES, PROMPT_BLOCKS, BLOCK_SIZE = 64, 1_000_000, 128, 16
ENTRIES_EACH = NUM_ENTRIES // NUM_WORKERS
BATCH_BLOCKS = 256
"""Of one message, half of them stored and half removed: what some steps of a busy worker bring."""
NUM_KEPT = 4 * (PROMPT_BLOCKS // 2)
"""Blocks of each worker that stay: what prompts find."""
PART_S = 8.0
NUM_CALLERS = 32
TOGETHER_PLACE_PER_S, TOGETHER_EVENTS_PER_S = 500, 100_000


def resident_bytes(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


class Worker:
    """One stream: holds a window of its own endless sequence of blocks."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seq = 0
        self.held: deque[bytes] = deque()
        self.draw = random.Random(number)
        self.call: Any = None

    async def begin(self, stub: Any) -> None:
        self.call = stub.Publish()
        hello = pb.Hello(
            worker_id=f"worker-{self.number}", epoch=1, model="m", block_size=BLOCK_SIZE, windows=[0],
            num_blocks=2 * ENTRIES_EACH, max_num_seqs=64,
        )  # fmt: skip
        await self.call.write(pb.WorkerUpdate(hello=hello))
        await self.call.read()
        for start in range(0, ENTRIES_EACH, 4096):
            hashes = [self.draw.randbytes(16) for _ in range(min(4096, ENTRIES_EACH - start))]
            self.held.extend(hashes[NUM_KEPT if start == 0 else 0 :])
            await self.send(pb.BlockEvent(stored=pb.Blocks(hashes=b"".join(hashes))))
        await self.report()

    async def report(self) -> None:
        load = pb.LoadReport(
            num_uncached_tokens=self.draw.randrange(4000), num_running=self.draw.randrange(64),
            num_free_blocks=ENTRIES_EACH, num_empty_blocks=ENTRIES_EACH // 2,
            rates=pb.Rates(prefill_s_per_token=1e-4, prefill_s_per_token_and_context=1e-9, step_s_per_sequence=1e-4),
        )  # fmt: skip
        await self.call.write(pb.WorkerUpdate(load=load))

    async def send(self, *events: pb.BlockEvent) -> None:
        self.seq += 1
        await self.call.write(pb.WorkerUpdate(events=pb.EventBatch(epoch=1, seq=self.seq, events=events)))

    async def turn_over(self) -> int:
        """New blocks for old ones. Returns how many changed."""
        new = self.draw.randbytes(16 * (BATCH_BLOCKS // 2))
        old = b"".join(self.held.popleft() for _ in range(BATCH_BLOCKS // 2))
        self.held.extend(new[start : start + 16] for start in range(0, len(new), 16))
        await self.send(
            pb.BlockEvent(removed=pb.Blocks(hashes=old)), pb.BlockEvent(stored=pb.Blocks(hashes=new))
        )  # fmt: skip
        return BATCH_BLOCKS


async def ask(stub: Any, prompt: bytes, number: int) -> None:
    """One placement, admitted nowhere: given up, so that reservations do not pile up."""
    await stub.Place(
        pb.PlaceRequest(
            request_id=f"{os.getpid()}-{number}", model="m", hashes=prompt, num_tokens=PROMPT_BLOCKS * BLOCK_SIZE + 1,
            max_output_tokens=100, reservation_ms=200,
        ),
        timeout=10.0,
    )  # fmt: skip


def prompts(count: int) -> list[bytes]:
    """Half of each is what a worker keeps, the rest is new."""
    draw, found = random.Random(7), []
    for _ in range(count):
        worker = random.Random(draw.randrange(NUM_WORKERS))
        worker.randbytes(16 * (PROMPT_BLOCKS // 2) * draw.randrange(NUM_KEPT // (PROMPT_BLOCKS // 2)))
        found.append(worker.randbytes(16 * (PROMPT_BLOCKS // 2)) + draw.randbytes(16 * (PROMPT_BLOCKS // 2)))
    return found


async def place_flat_out(stub: Any, seconds: float) -> int:
    asked, numbers, end = prompts(500), iter(range(10**9)), time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            number = next(numbers)
            await ask(stub, asked[number % len(asked)], number)

    await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
    return next(numbers)


async def place_on_time(stub: Any, per_s: float, seconds: float) -> list[float]:
    """Seconds from when each was due."""
    asked, begin, took = prompts(500), time.monotonic(), []

    async def one(number: int, due: float) -> None:
        await ask(stub, asked[number % len(asked)], number)
        took.append(time.monotonic() - due)

    async with asyncio.TaskGroup() as group:
        for number in range(int(per_s * seconds)):
            due = begin + number / per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(one(number, due))
    return took


async def publish(workers: list[Worker], seconds: float, per_s: float | None) -> int:
    """Turn blocks over, flat out or at a pace."""
    begin, num_events = time.monotonic(), 0
    for turn in itertools.count():
        for worker in workers:
            if time.monotonic() - begin >= seconds:
                return num_events
            num_events += await worker.turn_over()
            if turn % 3 == worker.number % 3:
                await worker.report()
            if per_s is not None:
                await asyncio.sleep(max(0.0, num_events / per_s - (time.monotonic() - begin)))
    raise AssertionError("turns go on")


async def work(role: str, address: str) -> None:
    """A client process: says "ready", and at each line of its input does a part and says what came of it."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = DirectoryStub(channel)
        workers = [Worker(number) for number in range(NUM_WORKERS)] if role == "publish" else []
        for worker in workers:
            await worker.begin(stub)
        print("ready", flush=True)
        stays = asyncio.create_task(stay(workers))
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            stays.cancel()
            print(json.dumps(await PARTS[line](stub, workers)), flush=True)
            stays = asyncio.create_task(stay(workers))


async def stay(workers: list[Worker]) -> None:
    """Alive, between parts."""
    while True:
        await asyncio.sleep(0.5)
        for worker in workers:
            await worker.report()


async def _place(stub: Any, _: list[Worker]) -> Any:
    return await place_flat_out(stub, PART_S)


async def _place_on_time(stub: Any, _: list[Worker]) -> Any:
    return await place_on_time(stub, TOGETHER_PLACE_PER_S, PART_S)


async def _publish(_: Any, workers: list[Worker]) -> Any:
    return await publish(workers, PART_S, None)


async def _publish_on_time(_: Any, workers: list[Worker]) -> Any:
    return await publish(workers, PART_S, TOGETHER_EVENTS_PER_S)


PARTS: dict[str, Callable[[Any, list[Worker]], Awaitable[Any]]] = {
    "place": _place,
    "place_on_time": _place_on_time,
    "publish": _publish,
    "publish_on_time": _publish_on_time,
}


def settled_events(stub: Any) -> int:
    """Block events that the directory has taken, once it has taken all that was under way."""
    before, now = -1, 0
    while now != before:
        time.sleep(0.3)
        before, now = now, int(stub.Stats(pb.StatsRequest(), timeout=60.0).block_events)
    return now


class Client:
    """A client process."""

    def __init__(self, role: str, address: str) -> None:
        command = [sys.executable, __file__, role, address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, part: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(part + "\n")
        self.process.stdin.flush()

    def do(self, part: str) -> Any:
        self.begin(part)
        return json.loads(self.read())


def main() -> None:
    command = [str(PAGODA), "directory", "--port", "0", "--lease-s", "30", "--seed", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = server.stderr.readline().split(" at ")[1].split()[0]
        stub = DirectoryStub(grpc.insecure_channel(address))
        empty = resident_bytes(server.pid)
        publisher = Client("publish", address)
        settled_events(stub)
        stats = stub.Stats(pb.StatsRequest())
        bytes_per_entry = (resident_bytes(server.pid) - empty) / stats.num_entries
        print(f"{stats.num_entries} entries of {len(stats.workers)} workers, {bytes_per_entry:.0f} bytes each")
        placer = Client("place", address)
        placements = placer.do("place") / PART_S
        print(f"{placements:,.0f} placements/s")
        before, begin = settled_events(stub), time.monotonic()
        publisher.do("publish")
        events = (settled_events(stub) - before) / (time.monotonic() - begin)
        print(f"{events:,.0f} block events/s")
        publisher.begin("publish_on_time")
        took = np.asarray(placer.do("place_on_time")) * 1e3
        num_events = json.loads(publisher.read())
        p50, p99 = np.percentile(took, (50, 99))
        print(
            f"together: {num_events / PART_S:,.0f} block events/s and {len(took) / PART_S:,.0f} placements/s, "
            f"which take {p50:.1f} ms, p99 {p99:.1f} ms"
        )
        for client in (publisher, placer):
            client.process.terminate()
            client.process.wait()
        server.terminate()
    result = {
        "placements_per_s": placements,
        "events_per_s": events,
        "place_p50_ms": float(p50),
        "place_p99_ms": float(p99),
        "together_events_per_s": num_events / PART_S,
        "bytes_per_entry": bytes_per_entry,
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work(*sys.argv[1:]))
    else:
        main()
