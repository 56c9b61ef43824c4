"""The gRPC API over an `InferenceService`. Only adapts: reads messages, answers."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pagoda.cluster.ingress.deadlines import Deadline
from pagoda.cluster.ingress.generation import TextOutput
from pagoda.cluster.ingress.grpc_log import GrpcLog
from pagoda.cluster.ingress.request_log import AnswerCounts, RequestRecord
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.tenant_registry import Authenticate, UnauthenticatedError, anybody
from pagoda.cluster.tenants import Tenant
from pagoda.proto import inference_pb2
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import quoted
from pagoda.worker.types import SamplingParams, TokenLogprobs
from pagoda.worker.vocabulary import Vocabulary

MAX_REQUEST_ID = 128
Metadata = Sequence[tuple[str, str | bytes]]
"""Of a call, as gRPC gives it."""
_ROLES = ("system", "developer", "user", "assistant")


@dataclass(slots=True)
class _Sample:
    """How far one sample of an answer has come."""

    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None

    def add(self, output: TextOutput) -> None:
        self.num_output_tokens += output.num_new_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = output.finish_reason


class GrpcApi:
    """The methods of `pagoda.v1.Inference`. They raise `PagodaError`; whoever hosts them makes statuses of it."""

    def __init__(
        self, service: InferenceService, model_name: str, log: GrpcLog, authenticate: Authenticate = anybody
    ) -> None:
        self._service = service
        self._log = log
        self._authenticate = authenticate
        self._model_name = model_name

    async def generate(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        with self._log.call("Generate", request) as record:
            tenant = self._tenant_of(metadata)
            self._check_model(request.model)
            sampling = sampling_params(request.sampling)
            deadline = self._deadline(request)
            match request.WhichOneof("prompt"):
                case "text":
                    prompt = await deadline.bound(self._service.encode(request.text))
                case "token_ids":
                    prompt = list(request.token_ids.ids)
                case _:
                    raise InvalidRequestError("prompt", "give either text or token_ids")
            async with aclosing(self._run(prompt, sampling, request, tenant, deadline, record)) as responses:
                async for response in responses:
                    yield response

    async def chat(
        self, request: inference_pb2.ChatRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        with self._log.call("Chat", request) as record:
            tenant = self._tenant_of(metadata)
            self._check_model(request.model)
            sampling = sampling_params(request.sampling)
            deadline = self._deadline(request)
            prompt = await deadline.bound(self._service.encode_chat(_checked(request.messages)))
            running = self._run(prompt, sampling, request, tenant, deadline, record, prompt_name="messages")
            async with aclosing(running) as responses:
                async for response in responses:
                    yield response

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, metadata: Metadata = ()
    ) -> inference_pb2.TokenizeResponse:
        with self._log.call("Tokenize", request):
            self._tenant_of(metadata)
            self._check_model(request.model)
            match request.WhichOneof("input"):
                case "text":
                    token_ids = await self._service.tokenize(request.text)
                case "conversation":
                    token_ids = await self._service.tokenize_chat(_checked(request.conversation.messages))
                case _:
                    raise InvalidRequestError("input", "give either text or conversation")
            return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=self._service.limits.max_model_len)

    async def list_models(
        self, request: inference_pb2.ListModelsRequest, metadata: Metadata = ()
    ) -> inference_pb2.ListModelsResponse:
        with self._log.call("ListModels", request):
            self._tenant_of(metadata)
            model = inference_pb2.ModelInfo(id=self._model_name, max_model_len=self._service.limits.max_model_len)
            return inference_pb2.ListModelsResponse(models=[model])

    async def abort(self, request: inference_pb2.AbortRequest, metadata: Metadata = ()) -> inference_pb2.AbortResponse:
        with self._log.call("Abort", request):
            tenant = self._tenant_of(metadata)
            if not request.request_id:
                raise InvalidRequestError("request_id", "must not be empty")
            self._service.abort(request.request_id, tenant=tenant)
            return inference_pb2.AbortResponse()

    async def _run(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        tenant: Tenant,
        deadline: Deadline,
        record: RequestRecord,
        *,
        prompt_name: str = "prompt",
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        if len(request.request_id) > MAX_REQUEST_ID or not request.request_id.isprintable():
            raise InvalidRequestError("request_id", f"must be printable and at most {MAX_REQUEST_ID} characters")
        self._service.check(prompt, sampling, names={"prompt": prompt_name})
        generation = self._service.generate(
            prompt,
            sampling,
            priority=request.priority,
            request_id=request.request_id or None,
            tenant=tenant,
            salt=tenant.salt(request.cache_salt),
            deadline=deadline,
        )
        samples = [_Sample() for _ in range(sampling.n)]
        record.follow(
            lambda: AnswerCounts(
                answer_id=generation.request.request_id,
                num_prompt_tokens=len(prompt),
                num_cached_tokens=samples[0].num_cached_tokens,  # the others share its prompt
                num_output_tokens=sum(sample.num_output_tokens for sample in samples),
                finish_reasons=[sample.finish_reason for sample in samples],
            )
        )

        def usage_of(sample: _Sample) -> inference_pb2.Usage:
            return inference_pb2.Usage(
                prompt_tokens=len(prompt),
                completion_tokens=sample.num_output_tokens,
                cached_tokens=samples[0].num_cached_tokens,
            )

        async with aclosing(generation.outputs) as batches:
            async for batch in batches:
                record.tokens_arrive()
                for output in batch:
                    sample = samples[output.index]
                    sample.add(output)
                    yield _response(
                        generation.request.request_id,
                        output,
                        None if output.finish_reason is None else usage_of(sample),
                        self._service.vocabulary,
                    )

    def _deadline(self, request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> Deadline:
        return self._service.deadline(request.timeout_s if request.HasField("timeout_s") else None)

    def _tenant_of(self, metadata: Metadata) -> Tenant:
        values = [value for name, value in metadata if name == "authorization"]
        if len(values) > 1:
            raise UnauthenticatedError("authorization is given several times")
        return self._authenticate(str(values[0]) if values else None)

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise InvalidRequestError("model", f"{quoted(name)} is not served here; served: {self._model_name!r}")


def sampling_params(message: inference_pb2.Sampling) -> SamplingParams:
    """Validated sampling parameters. Raises `InvalidRequestError` naming the field."""
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields() if not field.is_repeated}
    given.setdefault("max_tokens", None)
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    params = SamplingParams(stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids), **given)
    params.validate()
    return params


def _checked(messages: Sequence[inference_pb2.Message]) -> list[dict[str, str]]:
    """As chat templates take them."""
    if not messages:
        raise InvalidRequestError("messages", "must hold at least one message")
    for position, message in enumerate(messages):
        if message.role not in _ROLES:
            raise InvalidRequestError(f"messages.{position}.role", f"must be one of {', '.join(_ROLES)}")
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]


def _response(
    request_id: str, output: TextOutput, usage: inference_pb2.Usage | None, vocabulary: Vocabulary
) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason or "",
        logprobs=[_logprobs(entry, vocabulary) for entry in output.logprobs],
        usage=usage,
    )


def _logprobs(entry: TokenLogprobs, vocabulary: Vocabulary) -> inference_pb2.TokenLogprobs:
    def message(token_id: int, logprob: float) -> inference_pb2.Logprob:
        return inference_pb2.Logprob(token_id=token_id, token=vocabulary.text_of(token_id), logprob=logprob)

    return inference_pb2.TokenLogprobs(
        sampled=message(entry.token_id, entry.logprob), top=[message(token_id, value) for token_id, value in entry.top]
    )
