"""A directory without a network, and what workers and ingresses tell it."""

from typing import Any

from pagoda.cluster.directory.state import DirectoryState
from pagoda.cluster.directory.worker_record import WorkerRecord
from pagoda.proto import directory_pb2 as pb

BLOCK_SIZE = 16
CLEARED = pb.BlockEvent(cleared=pb.AllBlocksCleared())
OK, OUT_OF_RANGE, DATA_LOSS = pb.DirectoryAck.OK, pb.DirectoryAck.OUT_OF_RANGE, pb.DirectoryAck.DATA_LOSS


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def stored(*numbers: int) -> pb.BlockEvent:
    return pb.BlockEvent(stored=pb.Blocks(hashes=keys(*numbers)))


def removed(*numbers: int) -> pb.BlockEvent:
    return pb.BlockEvent(removed=pb.Blocks(hashes=keys(*numbers)))


class Cluster:
    """A directory and what a test tells it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.state = DirectoryState("d", now_s=self.now_s, draw=lambda: 0.5, lease_s=3.0, reservation_s=30.0)
        self.streams: dict[str, tuple[WorkerRecord, int]] = {}

    def hello(self, worker_id: str, **changes: Any) -> pb.DirectoryAck:
        fields: dict[str, Any] = {
            "worker_id": worker_id, "epoch": 1, "model": "m", "block_size": BLOCK_SIZE, "windows": [0],
            "num_blocks": 1000, "max_num_seqs": 8,
        }  # fmt: skip
        record, stream, ack = self.state.workers.hello(pb.Hello(**fields | changes), self.now_s)
        self.streams[worker_id] = record, stream
        return ack

    def send(self, worker_id: str, **update: Any) -> int | None:
        """The status of the answer, if there is one."""
        ack = self.state.workers.update(self.streams[worker_id][0], pb.WorkerUpdate(**update), self.now_s)
        return None if ack is None else ack.status

    def events(self, worker_id: str, seq: int, *events: pb.BlockEvent, epoch: int = 1) -> int | None:
        return self.send(worker_id, events=pb.EventBatch(epoch=epoch, seq=seq, events=events))

    def load(self, worker_id: str, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "num_free_blocks": 1000, "num_empty_blocks": 1000, "rates": pb.Rates(prefill_s_per_token=1e-3)
        }  # fmt: skip
        self.send(worker_id, load=pb.LoadReport(**defaults | fields))

    def place(self, request_id: str, *numbers: int, **fields: Any) -> pb.PlaceResponse:
        num_tokens = fields.pop("num_tokens", len(numbers) * BLOCK_SIZE + 1)
        request = pb.PlaceRequest(
            request_id=request_id, model="m", hashes=keys(*numbers), num_tokens=num_tokens, **fields
        )
        return self.state.place(request, self.now_s)

    def held(self, *numbers: int) -> dict[str, int]:
        """How many of these blocks each worker holds, from the first on."""
        answer = self.state.lookup(pb.LookupRequest(model="m", hashes=keys(*numbers)), self.now_s)
        return {worker.worker_id: worker.num_blocks for worker in answer.workers}

    def worker(self, worker_id: str) -> pb.WorkerStats:
        (stats,) = (each for each in self.state.stats(self.now_s).workers if each.worker_id == worker_id)
        return stats


def two_workers() -> Cluster:
    """`a` and `b`, with nothing to do."""
    cluster = Cluster()
    for worker_id in ("a", "b"):
        cluster.hello(worker_id)
        cluster.load(worker_id)
    return cluster
