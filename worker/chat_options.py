"""How a conversation becomes a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.worker.errors import InvalidRequestError

RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What a template gets anyway, and what would be a setting of its renderer."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the chat template is told besides the messages."""

    add_generation_prompt: bool = True
    """End with the beginning of the assistant's answer."""
    continue_final_message: bool = False
    """End inside the last message, which is to be continued."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables that this model's template knows of."""
    add_special_tokens: bool = False
    """Put the tokenizer's special tokens around what the template made; most templates write their own."""

    def validate(self) -> None:
        """Raise `InvalidRequestError` naming the field."""
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError("add_generation_prompt", "contradicts continue_final_message")
        if reserved := sorted(RESERVED_KWARGS & self.template_kwargs.keys()):
            raise InvalidRequestError("chat_template_kwargs", f"must not contain {reserved[0]!r}")
