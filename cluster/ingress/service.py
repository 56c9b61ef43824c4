"""What every API endpoint does: text in, text out. Knows no HTTP.

prompt or messages -> tokens -> a worker's stream of outputs -> text, piece by piece
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import Protocol, TypeVar

from pagoda.cluster.ingress.deadlines import Deadline, checked_timeout_s
from pagoda.cluster.ingress.generation import Generation, RequestAbortedError, TextOutput, to_text
from pagoda.cluster.ingress.live_requests import DrainingError, LiveRequests
from pagoda.cluster.ingress.refusals import OnRefused, refusal_reason
from pagoda.cluster.ingress.tenant_limits import TenantGates
from pagoda.cluster.public_prefixes import PublicPrefixes
from pagoda.cluster.tenants import ANONYMOUS, Tenant
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.config import EngineLimits
from pagoda.worker.detokenizer import Detokenizer
from pagoda.worker.engine import check_request
from pagoda.worker.errors import (
    EngineStoppedError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
)
from pagoda.worker.tokenizer import ChatMessage, Tokenizer
from pagoda.worker.types import Request, RequestId, SamplingParams, SequenceOutput
from pagoda.worker.vocabulary import Vocabulary

T = TypeVar("T")
_END_GRACE_S = 5.0
"""How long a worker has to end what is whole, before it is aborted."""
MAX_ASIDE = 64
"""Texts that wait to be tokenised without being prompts; each may take a second."""
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


class WorkerClient(Protocol):
    """How an ingress reaches its workers."""

    async def ping(self) -> None:
        """Raises if no worker answers in time."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[list[SequenceOutput], None]:
        """Run a request on some worker. Closing the generator aborts it. Raises as `Engine.add` does."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a request by its id, whichever ingress it came through. Unknown and ended ones are ignored."""
        ...

    def complete_sample(self, request_id: RequestId, index: int) -> None:
        """One sample of a running request is whole, and ends as stopped; what still comes for it may be ignored."""
        ...

    async def scrape(self) -> list[str | None]:
        """What each worker has measured, as Prometheus text; None of those that do not answer in time."""
        ...


class InferenceService:
    """Tokenises, checks, sends to a worker, turns tokens into text. One per ingress process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        client: WorkerClient,
        limits: EngineLimits,
        *,
        max_timeout_s: float | None = None,
        on_refused: OnRefused = lambda _: None,
    ) -> None:
        """`max_timeout_s` is what a request may take, and takes that asks for no less; None sets no limit.

        `on_refused` hears why whenever a request is refused that could be served at another time.
        """
        self.limits = limits
        self._max_timeout_s = max_timeout_s
        self._on_refused = on_refused
        self._gates = TenantGates()
        self._tokenizer = tokenizer
        self._client = client
        self.public_prefixes = PublicPrefixes()
        """Whoever knows better may put others in their place, from any thread."""
        self._live = LiveRequests(client.abort)
        self._ending: set[asyncio.Task[None]] = set()
        """Requests whose answers are whole and whose workers have yet to end them."""
        # One thread, since the tokenizer remembers prompts; and one for what is no prompt, which no prompt waits for.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._tokenizing_aside = ThreadPoolExecutor(1, thread_name_prefix="tokenize-aside")
        self._num_aside = 0

    async def is_healthy(self) -> bool:
        """Whether new requests are taken and a worker answers."""
        if self._live.is_draining:
            return False
        try:
            await self._client.ping()
        except Exception:  # noqa: BLE001  (whatever is wrong, the answer is no)
            return False
        return True

    @property
    def is_draining(self) -> bool:
        """Whether the service is stopping."""
        return self._live.is_draining

    async def drain(self, timeout_s: float) -> None:
        """Refuse new generations; return once none runs, or once those that still ran after `timeout_s` were aborted.

        What is aborted raises `DrainingError` where it is iterated.
        """
        await self._live.drain(timeout_s)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._tokenizer.vocabulary

    async def scrape_workers(self) -> list[str | None]:
        """What each worker has measured, as Prometheus text; None of those that do not answer in time."""
        return await self._client.scrape()

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Until when a request that was just read may take, which asks for so many seconds or for none.

        Raises `InvalidRequestError`.
        """
        return Deadline(checked_timeout_s(timeout_s, self._max_timeout_s))

    async def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a prompt that is to be completed."""
        limit = self.limits.max_model_len
        return await self._in_thread(
            lambda: self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=limit)
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text that need not fit the model. Raises `OverloadedError` if too many such texts wait."""
        return await self._aside(lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def tokenize_chat(self, messages: Sequence[ChatMessage], options: ChatOptions | None = None) -> list[int]:
        """The same of a chat."""
        return await self._aside(lambda: self._tokenizer.encode_chat(messages, options))

    async def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions | None = None) -> list[int]:
        """Tokens of a chat that is to be continued."""
        limit = self.limits.max_model_len
        return await self._in_thread(lambda: self._tokenizer.encode_chat(messages, options, max_tokens=limit))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens that came from a client. Raises `InvalidRequestError` for ids outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.limits.vocab_size):
            raise InvalidRequestError("tokens", f"token ids must be in [0, {self.limits.vocab_size})")
        return await self._aside(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def check(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, names: Mapping[str, str] = _NO_NAMES
    ) -> None:
        """Raise `InvalidRequestError` if no worker could ever serve this. `names`: what the client calls the fields."""
        try:
            check_request(prompt_token_ids, sampling, self.limits)
        except InvalidRequestError as error:
            raise InvalidRequestError(names.get(error.field, error.field), error.message) from None

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
        tenant: Tenant = ANONYMOUS,
        salt: bytes = b"",
        deadline: Deadline | None = None,
    ) -> Generation:
        """A generation for a checked request. Iterating it raises what the worker raises when it refuses.

        Only requests of one `salt` share cached blocks, but for those of public prefixes. Until its `deadline` it may
        take; by default, `max_timeout_s`.

        Raises `DrainingError` when the service is stopping; so does iterating one that comes too late. Iterating it
        also raises `TenantLimitError` if the tenant has too much already, and `DeadlineExceededError`.
        The engine's id begins with `request_id`.
        """
        try:
            self._live.refuse_if_draining()
        except DrainingError as error:
            self._on_refused(refusal_reason(error))
            raise
        if priority < 0 and not tenant.is_operator:
            raise InvalidRequestError(
                "priority", "below 0 is for the operator's keys: it goes before all tenants' turns"
            )
        deadline = deadline or self.deadline(None)
        prompt = tuple(prompt_token_ids)
        request = Request(
            request_id=RequestId(tenant.new_request_id(request_id)),
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=priority,
            salt=salt,
            num_public_tokens=self.public_prefixes.num_public_tokens(prompt) if salt else 0,
            tenant=tenant.name,
            weight=tenant.weight,
            timeout_s=deadline.left_s,
        )
        return Generation(request, self._admitted(request, tenant, deadline.limit(self._text_outputs(request))))

    def abort(self, request_id: str, *, tenant: Tenant = ANONYMOUS) -> None:
        """End a running request by its id. Unknown and ended ones are ignored, and those of others alike."""
        if tenant.may_end(request_id):
            self._client.abort(RequestId(request_id))

    def close(self) -> None:
        for pool in (self._tokenizing, self._tokenizing_aside):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _admitted(
        self, request: Request, tenant: Tenant, outputs: AsyncGenerator[list[TextOutput], None]
    ) -> AsyncGenerator[list[TextOutput], None]:
        """The same outputs, if the tenant's limits let the request in."""
        clock = asyncio.get_running_loop().time
        sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
        max_tokens = sampling.max_tokens or self.limits.max_model_len - num_prompt_tokens
        is_begun = False
        try:
            admission = self._gates.admit(
                tenant,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=max_tokens * sampling.n,
                now_s=clock(),
            )
            try:
                async with aclosing(outputs):
                    async for batch in outputs:
                        is_begun = True
                        for output in batch:
                            admission.num_output_tokens += output.num_new_tokens
                        yield batch
            finally:
                self._gates.release(admission, clock())
        except (OverloadedError, EngineStoppedError) as error:
            if not is_begun:
                self._on_refused(refusal_reason(error))
            raise

    async def _text_outputs(self, request: Request) -> AsyncGenerator[list[TextOutput], None]:
        sampling = request.sampling
        detokenizers = {
            index: Detokenizer(
                self._tokenizer.text_decoder(skip_special_tokens=sampling.skip_special_tokens),
                stop=sampling.stop,
                min_tokens=sampling.min_tokens,
                include_stop=sampling.include_stop_str_in_output,
            )
            for index in range(sampling.n)
        }
        is_cut = False
        with self._live.running(request.request_id):
            stream = self._client.stream(request)
            try:
                async for batch in stream:
                    pieces = []
                    for output in batch:
                        detokenizer = detokenizers.get(output.index)
                        if detokenizer is None:
                            continue  # a stop string ended this sample already
                        piece = to_text(output, detokenizer, shows_end=sampling.include_stop_str_in_output)
                        if piece.finish_reason is not None:
                            del detokenizers[output.index]
                            if output.finish_reason is None:
                                is_cut = True
                                self._client.complete_sample(request.request_id, output.index)
                        pieces.append(piece)
                    if pieces:
                        yield pieces
                    if not detokenizers:
                        return
            except RequestAbortedError:
                if self._live.is_draining:
                    raise DrainingError("the service is stopping, and the request was aborted") from None
                raise
            finally:
                if is_cut and not detokenizers:
                    self._end_in_background(stream)
                else:
                    await stream.aclose()

    def _end_in_background(self, stream: AsyncGenerator[list[SequenceOutput], None]) -> None:
        """Closing it now would abort at the worker what is whole, and count so; nobody waits for the worker's end."""

        async def end() -> None:
            with suppress(TimeoutError, PagodaError):
                async with asyncio.timeout(_END_GRACE_S), aclosing(stream):
                    async for _ in stream:
                        pass

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def _aside(self, function: Callable[[], T]) -> T:
        if self._num_aside >= MAX_ASIDE:
            error = OverloadedError(f"{MAX_ASIDE} texts wait to be tokenised already; try again later")
            self._on_refused(refusal_reason(error))
            raise error
        self._num_aside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing_aside, function)
        finally:
            self._num_aside -= 1
