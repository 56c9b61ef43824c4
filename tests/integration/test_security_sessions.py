"""A worker whose session brings what is no batch: its own requests fail, the ingress and other workers go on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pagoda.cluster.ingress.sessions import WorkerEndpoint, WorkerLostError, WorkerSessions
from pagoda.proto import tokens_pb2 as pb
from pagoda.proto import tokens_pb2_grpc
from pagoda.worker.pending_outputs import PendingOutputs
from pagoda.worker.token_stream import encode
from pagoda.worker.types import RequestId, SequenceOutput

DEADLINE_S = 30.0
REQUEST = RequestId("r")


def uneven() -> pb.TokenBatch:
    batch = encode([SequenceOutput(REQUEST, 0, (1,))])
    batch.token_ids.append(2)
    return batch


async def read(outputs: PendingOutputs) -> None:
    async for _ in outputs.until_ended(1):
        pass


LIES = {
    "columns of different lengths": uneven(),
    "a reason that is none": pb.TokenBatch(outputs=[pb.SampleOutput(request_id=REQUEST, finish_reason=99)]),  # type: ignore[arg-type]
    "alternatives without numbers": pb.TokenBatch(
        outputs=[pb.SampleOutput(request_id=REQUEST, logprobs=[pb.LogprobEntry(top_token_ids=[1])])]
    ),
}


class Liar(tokens_pb2_grpc.TokenStreamServicer):
    """Begins the request, then lies, and listens on."""

    def __init__(self, lie: pb.TokenBatch) -> None:
        self.lie = lie
        self.num_sessions = 0
        self.is_dialled_again = asyncio.Event()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.TokenBatch]:  # noqa: ARG002
        self.num_sessions += 1
        if self.num_sessions > 1:
            self.is_dialled_again.set()
        else:
            yield encode([SequenceOutput(REQUEST, 0, (1,))])
            yield self.lie
        async for _ in request_iterator:
            pass


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_what_is_no_batch_ends_the_session(lie: pb.TokenBatch) -> None:
    """Before, the task that reads it ended for good, and the worker's requests waited for ever."""
    liar = Liar(lie)
    server = grpc.aio.server()
    tokens_pb2_grpc.add_TokenStreamServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sessions = WorkerSessions("front", token="token")
    try:
        outputs = sessions.open(REQUEST)
        sessions.set_routable([WorkerEndpoint(f"127.0.0.1:{port}", "boot")])
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(read(outputs), DEADLINE_S)
        await asyncio.wait_for(liar.is_dialled_again.wait(), DEADLINE_S)
    finally:
        await sessions.shutdown()
        await server.stop(0)
