"""The bodies that the API's endpoints take."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from pagoda.cluster.ingress.fields import CompletionTokensField, GenerationFields, Listed, Strict
from pagoda.cluster.ingress.messages import MAX_MESSAGES, ChatMessage, chat_options
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.types import MAX_LOGPROBS


class ChatCompletionRequest(CompletionTokensField, GenerationFields):
    messages: Annotated[Listed[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        self.settle_max_tokens()
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError("top_logprobs", f"must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "only allowed with logprobs: true")
        if self.echo and not self.continue_final_message:
            raise InvalidRequestError("echo", "only allowed with continue_final_message: true")

    def chat_options(self) -> ChatOptions:
        """Validated. Raises `InvalidRequestError` naming the field."""
        return chat_options(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            add_special_tokens=self.add_special_tokens,
        )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token of the output; None reports nothing."""
        return self.top_logprobs or 0 if self.logprobs else None

    def _reported(self) -> dict[str, Any]:
        return {"logprobs": self.num_logprobs, "prompt_logprobs": self.prompt_logprobs}


class CompletionRequest(GenerationFields):
    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if not self.prompt:
            raise InvalidRequestError("prompt", "must not be empty")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt: a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return self.prompt

    @property
    def is_prompt_only(self) -> bool:
        """Whether the client wants the prompt back, with its log probabilities, and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def _reported(self) -> dict[str, Any]:
        prompt_logprobs = [n for n in (self.prompt_logprobs, self.logprobs if self.echo else None) if n is not None]
        reported: dict[str, Any] = {
            "logprobs": self.logprobs,
            "prompt_logprobs": max(prompt_logprobs) if prompt_logprobs else None,
        }
        # The engine always generates; what it generates is left out of the answer.
        return reported | ({"max_tokens": 1} if self.is_prompt_only else {})


class TokenizeRequest(Strict):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Listed[ChatMessage] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Rules between fields. Raises `InvalidRequestError`."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "give either prompt or messages")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise InvalidRequestError(name, "only allowed with messages")

    def chat_options(self) -> ChatOptions:
        """Validated, for messages. Raises `InvalidRequestError` naming the field."""
        return chat_options(
            self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            add_special_tokens=self.add_special_tokens,
        )


class LookupRequest(TokenizeRequest):
    cache_salt: str | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Listed[int]
