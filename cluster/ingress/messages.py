"""The messages of a chat and how they become a prompt."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from pagoda.cluster.ingress.fields import Listed, Neutral, Strict, refuse_unsupported
from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import InvalidRequestError

MAX_MESSAGES = 10_000
"""In one chat."""
MAX_PARTS = 1000
"""Of one message."""

_NEUTRAL_IN_MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[TextPart]
    name: str | None = None
    """Accepted, has no effect: chat templates do not show it."""

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, data: object) -> object:
        return refuse_unsupported(data, _NEUTRAL_IN_MESSAGE)

    @field_validator("content")
    @classmethod
    def _check_number_of_parts(cls, content: str | list[TextPart]) -> str | list[TextPart]:
        if not isinstance(content, str) and len(content) > MAX_PARTS:
            raise PydanticCustomError("too_many_parts", "may have {limit} parts", {"limit": MAX_PARTS})
        return content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: `developer` is today's name of `system`, text parts are one text."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


def chat_options(
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
    add_special_tokens: bool | None,
) -> ChatOptions:
    """Validated options, from the fields of these names. Raises `InvalidRequestError` naming the field.

    A message that is continued stands where the generation prompt would: asking for both is a contradiction.
    """
    continues = bool(continue_final_message)
    if continues and messages[-1].role != "assistant":
        raise InvalidRequestError("continue_final_message", "the last message is not the assistant's")
    options = ChatOptions(
        add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=chat_template_kwargs or {},
        add_special_tokens=bool(add_special_tokens),
    )
    options.validate()
    return options
