"""`/tokenize` and `/detokenize`, as in vLLM."""

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagoda.cluster.ingress.schemas import DetokenizeRequest, TokenizeRequest
from pagoda.cluster.ingress.service import InferenceService


class TokensApi:
    """The endpoints."""

    def __init__(self, service: InferenceService, check_model: Callable[[str], None]) -> None:
        """`check_model` raises for names of models that are not served."""
        self._service = service
        self._check_model = check_model

    async def tokenize(self, http: HttpRequest) -> Response:
        body = TokenizeRequest.model_validate_json(await http.body())
        tokens = await self.tokens_of(body)
        # A text may have a million tokens: away from the event loop.
        content = await asyncio.to_thread(self._answer, tokens, has_strings=bool(body.return_token_strs))
        return Response(content, media_type="application/json")

    async def tokens_of(self, body: TokenizeRequest) -> list[int]:
        """Raises what answers a request that cannot be served."""
        if body.model is not None:
            self._check_model(body.model)
        body.check()
        if body.messages is None:
            adds_special_tokens = body.add_special_tokens in (None, True)
            return await self._service.tokenize(body.prompt or "", add_special_tokens=adds_special_tokens)
        messages = [message.for_template() for message in body.messages]
        return await self._service.tokenize_chat(messages, body.chat_options())

    def _answer(self, tokens: list[int], *, has_strings: bool) -> bytes:
        return to_json(
            {
                "count": len(tokens),
                "max_model_len": self._service.limits.max_model_len,
                "tokens": tokens,
                "token_strs": list(map(self._service.vocabulary.text_of, tokens)) if has_strings else None,
            }
        )

    async def detokenize(self, http: HttpRequest) -> dict[str, Any]:
        body = DetokenizeRequest.model_validate_json(await http.body())
        if body.model is not None:
            self._check_model(body.model)
        return {"prompt": await self._service.decode(body.tokens, skip_special_tokens=False)}
