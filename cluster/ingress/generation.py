"""What comes of one request, and how several come together. Knows no workers and no HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from pagoda.worker.detokenizer import Detokenizer
from pagoda.worker.errors import DeadlineExceededError, EngineStoppedError, PagodaError
from pagoda.worker.types import FinishReason, Request, SequenceOutput, TokenLogprobs


class RequestAbortedError(EngineStoppedError):
    """A running request was ended from outside."""


class GenerationFailedError(PagodaError):
    """A worker accepted the request and then could not finish it."""


@dataclass(slots=True)  # not frozen, for speed
class TextOutput:
    """A piece of one sample's text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """The new tokens that count; their text may be held back."""
    finish_reason: FinishReason | None
    num_cached_tokens: int
    stop_reason: int | str | None = None
    """The stop token or string that ended it, if one did."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens, from the second on; all come before anything of another sample does."""

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Generation:
    """One request: nothing happens until `outputs` is iterated; closing that aborts the request."""

    request: Request
    outputs: AsyncGenerator[list[TextOutput], None]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


def prompt_only(generation: Generation) -> Generation:
    """The same, but of what is generated only the end shows: for clients that want to hear of their prompt."""

    async def outputs() -> AsyncGenerator[list[TextOutput], None]:
        async with aclosing(generation.outputs) as batches:
            async for batch in batches:
                yield [
                    replace(
                        output,
                        text="",
                        token_ids=(),
                        logprobs=(),
                        finish_reason=None if output.finish_reason is None else FinishReason.LENGTH,
                        stop_reason=None,
                    )
                    for output in batch
                ]

    return Generation(generation.request, outputs())


def to_text(output: SequenceOutput, detokenizer: Detokenizer, *, shows_end: bool) -> TextOutput:
    """`shows_end` says whether the text shows a token that ends the sequence."""
    reason = output.finish_reason
    if reason is FinishReason.ERROR:
        raise GenerationFailedError(output.error or "the worker could not finish the request")
    if reason is FinishReason.DEADLINE:
        raise DeadlineExceededError("the time that the request may take is over")
    if reason is FinishReason.ABORT:
        if output.error is not None:
            raise EngineStoppedError(output.error)
        raise RequestAbortedError("the request was aborted")
    visible = output.token_ids[:-1] if reason is FinishReason.STOP and not shows_end else output.token_ids
    num_tokens_before = detokenizer.num_tokens
    text = detokenizer.push(visible, is_last=reason is not None)
    num_new_tokens = len(output.token_ids)
    stop_reason: int | str | None = output.stop_reason
    if detokenizer.stopped_by is not None:
        reason = FinishReason.STOP
        stop_reason = detokenizer.stopped_by
        num_new_tokens = detokenizer.num_tokens - num_tokens_before  # those behind the stop string do not count
    return TextOutput(
        index=output.index,
        text=text,
        token_ids=output.token_ids[:num_new_tokens],
        finish_reason=reason,
        num_cached_tokens=output.num_cached_tokens,
        stop_reason=stop_reason,
        logprobs=output.logprobs[:num_new_tokens],
        prompt_logprobs=output.prompt_logprobs,
    )


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[TextOutput]], None]:
    """All generations' outputs as they come, each with its generation's position. Closing it closes them all."""
    if len(generations) == 1:
        async with aclosing(generations[0].outputs) as outputs:
            async for batch in outputs:
                yield 0, batch
        return
    queue: asyncio.Queue[tuple[int, list[TextOutput]] | BaseException | None] = asyncio.Queue(maxsize=64)

    async def forward(position: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.outputs) as outputs:
                async for batch in outputs:
                    await queue.put((position, batch))
        except Exception as error:  # noqa: BLE001  (raised again where the queue is read)
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(forward(position, generation)) for position, generation in enumerate(generations)]
    try:
        num_live = len(tasks)
        while num_live:
            item = await queue.get()
            if item is None:
                num_live -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
