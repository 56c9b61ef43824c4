"""The endpoints of the OpenAI API: models, chat completions and completions. From a body to a checked generation."""

import hashlib
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagoda import __version__
from pagoda.cluster.ingress.answers import AnswerBuilder, AnswerOptions, Endpoint, Prompt
from pagoda.cluster.ingress.authentication import tenant_of
from pagoda.cluster.ingress.fields import GenerationFields
from pagoda.cluster.ingress.generation import prompt_only
from pagoda.cluster.ingress.http_errors import UnknownModelError
from pagoda.cluster.ingress.request_id import request_id_of
from pagoda.cluster.ingress.responses import respond
from pagoda.cluster.ingress.schemas import ChatCompletionRequest, CompletionRequest
from pagoda.cluster.ingress.service import InferenceService
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import quoted
from pagoda.worker.types import SamplingParams

MAX_PROMPTS = 1024
"""Prompts in one completions request."""
COMPLETIONS_MAX_TOKENS = 16
"""The completions API's default."""


class OpenAiApi:
    """The endpoints."""

    def __init__(self, service: InferenceService, model_name: str) -> None:
        self._service = service
        self._model_name = model_name
        self._created = int(time.time())
        served = f"{model_name} {service.limits}"
        self._fingerprint = f"pagoda-{__version__}-{hashlib.sha256(served.encode()).hexdigest()[:8]}"

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def get_model(self, model: str) -> dict[str, Any]:
        self.check_model(model)
        return self._model()

    async def chat_completions(self, http: HttpRequest) -> Response:
        body = ChatCompletionRequest.model_validate_json(await http.body())
        self.check_model(body.model)
        body.check()
        tenant = tenant_of(http)
        salt = tenant.salt(body.cache_salt)
        sampling = body.sampling_params(default_max_tokens=None)
        options = body.chat_options()
        deadline = self._service.deadline(body.timeout_s)
        messages = [message.for_template() for message in body.messages]
        prompt = await deadline.bound(self._service.encode_chat(messages, options))
        names = {"prompt": "messages"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        self._service.check(prompt, sampling, names=names)
        generation = self._service.generate(
            prompt,
            sampling,
            priority=body.priority or 0,
            request_id=request_id_of(http),
            tenant=tenant,
            salt=salt,
            deadline=deadline,
        )
        prompts = [Prompt(prompt, body.messages[-1].text if body.echo else None)]
        builder = self._builder("chat", http, body, prompts, sampling, body.num_logprobs)
        return await respond(http, body, [generation], builder)

    async def completions(self, http: HttpRequest) -> Response:
        body = CompletionRequest.model_validate_json(await http.body())
        self.check_model(body.model)
        body.check()
        tenant = tenant_of(http)
        salt = tenant.salt(body.cache_salt)
        sampling = body.sampling_params(default_max_tokens=COMPLETIONS_MAX_TOKENS)
        if len(body.prompts) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"at most {MAX_PROMPTS} prompts in one request")
        room = self._service.limits.max_num_seqs + self._service.limits.max_num_waiting
        if len(body.prompts) > 1 and len(body.prompts) * sampling.n > room:
            raise InvalidRequestError(
                "prompt", f"{len(body.prompts)} prompts with n={sampling.n}: at most {room} samples"
            )
        deadline = self._service.deadline(body.timeout_s)
        prompts = [await deadline.bound(self._encode(body, prompt)) for prompt in body.prompts]
        for prompt in prompts:
            self._service.check(prompt, sampling)
        shown = [
            Prompt(tokens, await self._echo(body, prompt, tokens))
            for prompt, tokens in zip(body.prompts, prompts, strict=True)
        ]
        generations = [
            self._service.generate(
                p,
                sampling,
                priority=body.priority or 0,
                request_id=request_id_of(http),
                tenant=tenant,
                salt=salt,
                deadline=deadline,
            )
            for p in prompts
        ]
        if body.is_prompt_only:
            generations = [prompt_only(generation) for generation in generations]
        builder = self._builder("completions", http, body, shown, sampling, body.logprobs)
        return await respond(http, body, generations, builder)

    async def _encode(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._service.encode(prompt, add_special_tokens=body.add_special_tokens in (None, True))

    async def _echo(self, body: CompletionRequest, prompt: str | list[int], tokens: list[int]) -> str | None:
        if not body.echo:
            return None
        if isinstance(prompt, str):
            return prompt
        return await self._service.decode(tokens, skip_special_tokens=body.skip_special_tokens in (None, True))

    def _builder(
        self,
        endpoint: Endpoint,
        http: HttpRequest,
        body: GenerationFields,
        prompts: list[Prompt],
        sampling: SamplingParams,
        num_logprobs: int | None,
    ) -> AnswerBuilder:
        return AnswerBuilder(
            endpoint,
            request_id=request_id_of(http),
            model_name=self._model_name,
            fingerprint=self._fingerprint,
            prompts=prompts,
            num_samples=sampling.n,
            vocabulary=self._service.vocabulary,
            options=AnswerOptions(
                num_logprobs=num_logprobs,
                num_prompt_logprobs=body.prompt_logprobs,
                token_ids=bool(body.return_token_ids),
                skip_special_tokens=sampling.skip_special_tokens,
            ),
        )

    def check_model(self, name: str) -> None:
        """Raise `UnknownModelError` unless `name` is served here."""
        if name != self._model_name:
            raise UnknownModelError("model", f"{quoted(name)} is not served here; served: {self._model_name!r}")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pagoda",
            "max_model_len": self._service.limits.max_model_len,
        }
