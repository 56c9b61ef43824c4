"""The OpenAI API as types: what is accepted, what is refused by name, what is answered.

Field names and meanings follow the OpenAI API and vLLM's additions to it. Nothing is ignored silently: a field that
would change the answer and is not supported is refused, unless its value asks for nothing (`tools: []`).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.types import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that are not supported, and the values that ask for nothing. Null always does."""

_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def _refuse_unsupported(data: object, neutral: dict[str, tuple[Any, ...]]) -> object:
    """Drop unsupported fields that ask for nothing, refuse those that ask for something."""
    if not isinstance(data, dict):
        return data
    for name in data.keys() & neutral.keys():
        value = data[name]
        # True == 1 in Python; here it is another type and so another value.
        if value is not None and not any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral[name]
        ):
            raise PydanticCustomError("unsupported_field", "{field} is not supported", {"field": name})
    return {key: value for key, value in data.items() if key not in neutral}


class _Strict(BaseModel):
    """No coercion ("5" is not 5) and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False


class SamplingFields(_Strict):
    """What every kind of generation takes."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, data: object) -> object:
        return _refuse_unsupported(data, _NEUTRAL)

    def sampling_params(self, *, default_max_tokens: int | None) -> SamplingParams:
        """Validated sampling parameters. Raises `InvalidRequestError` naming the field."""
        given = self.model_dump(include=set(SamplingFields.model_fields) - {"stop"}, exclude_none=True)
        given.setdefault("max_tokens", default_max_tokens)
        if "stop_token_ids" in given:
            given["stop_token_ids"] = tuple(given["stop_token_ids"])
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        params = SamplingParams(stop=stop, **given)
        params.validate()
        return params


class GenerationFields(SamplingFields):
    """What both HTTP endpoints take besides."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    user: str | None = None
    """Accepted, has no effect."""
    metadata: dict[str, str] | None = None
    """Accepted, has no effect."""
    prompt_cache_key: str | None = None
    """Accepted, has no effect: prefixes are found by their content."""
    safety_identifier: str | None = None
    """Accepted, has no effect."""

    def check(self) -> None:
        """Rules between fields. Raises `InvalidRequestError`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "only allowed with stream: true")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError("priority", "must fit 32 bits")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    """Accepted, has no effect: chat templates do not show it."""

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, data: object) -> object:
        return _refuse_unsupported(data, _NEUTRAL_IN_MESSAGE)

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: `developer` is today's name of `system`, text parts are one text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    """Today's name of `max_tokens`."""

    def check(self) -> None:
        super().check()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequestError("max_completion_tokens", "contradicts max_tokens")
            if self.max_completion_tokens < 1:
                raise InvalidRequestError("max_completion_tokens", "must be at least 1")
            self.max_tokens = self.max_completion_tokens


class CompletionRequest(GenerationFields):
    prompt: str | list[str] | list[int] | list[list[int]]

    def check(self) -> None:
        super().check()
        if not self.prompt:
            raise InvalidRequestError("prompt", "must not be empty")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt: a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return self.prompt


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(*, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


def first_problem(problems: Sequence[Any]) -> tuple[str | None, str]:
    """(field, message) of the first of pydantic's `errors()`.

    A value that may be of several types fails once for each; shown is the type that it came closest to.
    """
    first = problems[0]["loc"][:1]
    problem = max(
        (problem for problem in problems if problem["loc"][:1] == first),
        key=lambda problem: (len(problem["loc"]), [part for part in problem["loc"] if isinstance(part, int)]),
    )
    if problem["type"] == "json_invalid":
        return None, f"not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
    # The location also names the members of a union ("str", "list[int]").
    location = [str(part) for part in problem["loc"] if part not in ("str", "int") and "[" not in str(part)]
    if problem["type"] == "unsupported_field":
        location.append(problem["ctx"]["field"])
    field = ".".join(location) or None
    message = {"unsupported_field": "is not supported", "extra_forbidden": "is unknown"}.get(problem["type"])
    return field, f"{field or 'body'}: {message or problem['msg']}"
