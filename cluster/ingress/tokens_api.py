"""`/tokenize` and `/detokenize`, as in vLLM."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request as HttpRequest

from pagoda.cluster.ingress.schemas import DetokenizeRequest, TokenizeRequest
from pagoda.cluster.ingress.service import InferenceService


class TokensApi:
    """The endpoints."""

    def __init__(self, service: InferenceService, check_model: Callable[[str], None]) -> None:
        """`check_model` raises for names of models that are not served."""
        self._service = service
        self._check_model = check_model

    async def tokenize(self, http: HttpRequest) -> dict[str, Any]:
        body = TokenizeRequest.model_validate_json(await http.body())
        if body.model is not None:
            self._check_model(body.model)
        body.check()
        if body.messages is None:
            adds_special_tokens = body.add_special_tokens in (None, True)
            tokens = await self._service.tokenize(body.prompt or "", add_special_tokens=adds_special_tokens)
        else:
            messages = [message.for_template() for message in body.messages]
            tokens = await self._service.tokenize_chat(messages, body.chat_options())
        vocabulary = self._service.vocabulary
        return {
            "count": len(tokens),
            "max_model_len": self._service.limits.max_model_len,
            "tokens": tokens,
            "token_strs": [vocabulary.text_of(token) for token in tokens] if body.return_token_strs else None,
        }

    async def detokenize(self, http: HttpRequest) -> dict[str, Any]:
        body = DetokenizeRequest.model_validate_json(await http.body())
        if body.model is not None:
            self._check_model(body.model)
        return {"prompt": await self._service.decode(body.tokens, skip_special_tokens=False)}
