"""Outputs on their way to a reader that may be slower than the engine.

What comes while the reader is away is merged per sample, so a slow reader costs a few numbers per token and delays
nobody: neither the engine nor the other requests.
"""

import asyncio
from collections.abc import AsyncGenerator

from pagoda.worker.types import RequestId, SequenceOutput


class PendingOutputs:
    """Made and put from the event loop, taken by one reader on the same loop."""

    def __init__(self) -> None:
        self._pending: dict[tuple[RequestId, int], SequenceOutput] = {}
        self._reader: asyncio.Future[None] | None = None
        """Of the reader, while it waits."""
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.is_ended = False
        """Whether `until_ended` has come to the end."""

    def put(self, output: SequenceOutput) -> None:
        """Add to what is pending for the output's sample."""
        key = (output.request_id, output.index)
        before = self._pending.get(key)
        self._pending[key] = output if before is None else before.merged_with(output)
        self._wake_reader()

    def fail(self, error: BaseException) -> None:
        """Make `take` raise `error` once what is pending is taken."""
        self._error = error
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def end_with(self, call: "asyncio.Future[None]") -> None:
        """Done-callback of the call that runs the request: what it raises, `take` raises."""
        if not call.cancelled() and (error := call.exception()) is not None:
            self.fail(error)

    async def until_ended(self, num_samples: int) -> AsyncGenerator[list[SequenceOutput], None]:
        """What `take` gives, until all of a request's samples have ended."""
        while num_samples:
            outputs = await self.take()
            num_samples -= sum(output.finish_reason is not None for output in outputs)
            self.is_ended = not num_samples
            yield outputs

    async def take(self) -> list[SequenceOutput]:
        """All that is pending, at least one output. Raises the error that `fail` was given."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            # An `asyncio.Event` takes twice as long, once a token.
            self._reader = self._loop.create_future()
            await self._reader
        outputs = list(self._pending.values())
        self._pending.clear()
        return outputs
