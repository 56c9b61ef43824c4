"""What the bodies of the API have in common: how strictly they are read, and the fields of every generation.

Field names and meanings follow the OpenAI API and vLLM's additions to it. Nothing is ignored silently: a field that
would change the answer and is not supported is refused, unless its value asks for nothing (`tools: []`).
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

from pagoda.cluster.ingress.deadlines import checked_timeout_s
from pagoda.worker.errors import InvalidRequestError
from pagoda.worker.quoting import quoted
from pagoda.worker.types import SamplingParams

MAX_FIELDS = 200
"""Of one JSON object that is read by its fields."""

Neutral = dict[str, tuple[Any, ...]]
"""Fields that are not supported, and the values that ask for nothing. Null always does."""

NEUTRAL: Neutral = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
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
"""Of generations; an endpoint that has one of these as a field of its own supports it."""


def refuse_unsupported(data: object, neutral: Neutral) -> object:
    """Drop unsupported fields that ask for nothing, refuse those that ask for something."""
    if not isinstance(data, dict):
        return data
    if len(data) > MAX_FIELDS:  # each unknown one would be an error of its own
        raise PydanticCustomError("too_many_fields", "has {count} fields", {"count": len(data)})
    for name in data.keys() & neutral.keys():
        value = data[name]
        # True == 1 in Python; here it is another type and so another value.
        if value is not None and not any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral[name]
        ):
            raise PydanticCustomError("unsupported_field", "{field} is not supported", {"field": name})
    return {key: value for key, value in data.items() if key not in neutral}


class _FailFast(FailFast):
    """Hashable, so that it may be part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Item = TypeVar("Item")
Listed = Annotated[list[Item], _FailFast()]
"""A list that is read up to its first mistake: a body has room for a million of them."""


class Strict(BaseModel):
    """No coercion ("5" is not 5) and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    """One more chunk at the end says the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk says the usage so far."""


class SamplingFields(Strict):
    """What every kind of generation takes."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id, which as a name in JSON is a string."""
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, data: object) -> object:
        return refuse_unsupported(data, {name: v for name, v in NEUTRAL.items() if name not in cls.model_fields})

    def sampling_params(self, *, default_max_tokens: int | None) -> SamplingParams:
        """Validated sampling parameters. Raises `InvalidRequestError` naming the field."""
        given = self.model_dump(include=set(SamplingFields.model_fields) - {"stop"}, exclude_none=True)
        if "logit_bias" in given:
            given["logit_bias"] = {_token_id(name): bias for name, bias in given["logit_bias"].items()}
        given |= self._reported()
        given.setdefault("max_tokens", default_max_tokens)
        if "stop_token_ids" in given:
            given["stop_token_ids"] = tuple(given["stop_token_ids"])
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        params = SamplingParams(stop=stop, **given)
        params.validate()
        return params

    def _reported(self) -> dict[str, Any]:
        """Parameters for what an endpoint reports besides the text."""
        return {}


class CompletionTokensField(SamplingFields):
    """Of bodies that may be chats."""

    max_completion_tokens: int | None = None
    """Today's name of `max_tokens`."""

    def settle_max_tokens(self) -> None:
        """Make `max_tokens` of it. Raises `InvalidRequestError`."""
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequestError("max_completion_tokens", "contradicts max_tokens")
            if self.max_completion_tokens < 1:
                raise InvalidRequestError("max_completion_tokens", "must be at least 1")
            self.max_tokens = self.max_completion_tokens


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) <= 10):
        raise InvalidRequestError("logit_bias", f"its names must be token ids, got {quoted(name)}")
    return int(name)


class GenerationFields(SamplingFields):
    """What both HTTP endpoints take besides."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    """Begin the text with the prompt; in a chat, with the message that is continued."""
    prompt_logprobs: int | None = None
    """Report the log probabilities of the prompt's tokens and of this many alternatives."""
    return_token_ids: bool | None = None
    """Report the tokens of prompt and output."""
    priority: int | None = None
    """Lower goes first, whoever sent it; below 0 is for operators, where tenants have keys."""
    timeout_s: float | None = None
    """Seconds that it may take, from when it has been read."""
    user: str | None = None
    """Accepted, has no effect."""
    metadata: dict[str, str] | None = None
    """Accepted, has no effect."""
    prompt_cache_key: str | None = None
    """Accepted, has no effect: prefixes are found by their content."""
    cache_salt: str | None = None
    """Only requests with the same one share cached prefixes, and only those of one tenant."""
    safety_identifier: str | None = None
    """Accepted, has no effect."""

    def check(self) -> None:
        """Rules between fields. Raises `InvalidRequestError`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "only allowed with stream: true")
        if self.continuous_usage and not self.include_usage:
            raise InvalidRequestError("stream_options.continuous_usage_stats", "only allowed with include_usage: true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "not available with stream: true")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError("priority", "must fit 32 bits")
        checked_timeout_s(self.timeout_s, None)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
