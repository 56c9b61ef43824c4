"""The bodies of the OpenAI API's answers, whole and in chunks."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from pagoda.cluster.ingress.schemas import Usage

Endpoint = Literal["chat", "completions"]


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    is_begun: bool = False
    """Whether a chunk of it was sent."""


class AnswerBuilder:
    """Builds one request's answer. Chunks and whole answers differ only in how a choice is shown."""

    def __init__(self, endpoint: Endpoint, model_name: str, num_choices: int) -> None:
        self._endpoint = endpoint
        self.choices = [Choice() for _ in range(num_choices)]
        self.answer_id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.answer_id,
            "created": int(time.time()),
            "model": model_name,
        }

    def chunk(self, index: int, text: str) -> dict[str, Any]:
        """The next piece of a choice, for a stream. Says its finish reason once that is known."""
        choice = self.choices[index]
        shown: dict[str, Any]
        if self._endpoint == "completions":
            shown = {"text": text}
        else:
            shown = {"delta": {"content": text} if choice.is_begun else {"role": "assistant", "content": text}}
        choice.is_begun = True
        entry = {"index": index, **shown, "logprobs": None, "finish_reason": choice.finish_reason}
        return {**self._head, "object": self._object(is_chunk=True), "choices": [entry]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that was asked to include usage."""
        return {**self._head, "object": self._object(is_chunk=True), "choices": [], "usage": usage.model_dump()}

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The complete answer."""
        entries = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.text)
            shown = (
                {"text": text}
                if self._endpoint == "completions"
                else {"message": {"role": "assistant", "content": text, "refusal": None}}
            )
            entries.append({"index": index, **shown, "logprobs": None, "finish_reason": choice.finish_reason})
        return {
            **self._head,
            "object": self._object(is_chunk=False),
            "choices": entries,
            "usage": usage.model_dump(),
        }

    def _object(self, *, is_chunk: bool) -> str:
        if self._endpoint == "completions":
            return "text_completion"
        return "chat.completion.chunk" if is_chunk else "chat.completion"


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI clients expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
