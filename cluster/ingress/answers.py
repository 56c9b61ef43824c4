"""The bodies of the OpenAI API's answers, whole and in chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagoda.cluster.ingress.generation import TextOutput
from pagoda.cluster.ingress.logprobs import (
    TextOffsets,
    Vocabulary,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from pagoda.cluster.ingress.usage import Usage
from pagoda.worker.types import TokenLogprobs

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer shows besides the text."""

    num_logprobs: int | None = None
    """Alternatives for each token of the output; None shows no log probabilities."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    token_ids: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Prompt:
    """What an answer may show of a prompt."""

    token_ids: Sequence[int] = ()
    echo: str | None = None
    """What the text begins with; None begins it with the output."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """From the second token on, as far as they have come."""


@dataclass(slots=True)
class Choice:
    """What came of one choice and was not shown yet."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    """Of the prompt's, how many were shown."""
    offsets: TextOffsets | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_begun: bool = False
    """Whether a part of it was shown."""


class AnswerBuilder:
    """Builds one request's answer. Chunks and whole answers differ only in how a choice is shown."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        request_id: str,
        model_name: str,
        fingerprint: str,
        prompts: Sequence[Prompt],
        num_samples: int,
        vocabulary: Vocabulary,
        options: AnswerOptions,
    ) -> None:
        """Choices are the samples of the first prompt, then those of the second, and so on."""
        self._endpoint = endpoint
        self._prompts = prompts
        self._num_samples = num_samples
        self._vocabulary = vocabulary
        self._options = options
        self.choices = [Choice() for _ in range(num_samples * len(prompts))]
        self.answer_id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{request_id}"
        self._head = {
            "id": self.answer_id,
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }

    def add(self, position: int, output: TextOutput) -> int:
        """Take a piece of one of the samples of the prompt at `position`. Returns its choice's index."""
        index = position * self._num_samples + output.index
        choice = self.choices[index]
        choice.text.append(output.text)
        choice.finish_reason = output.finish_reason
        choice.stop_reason = output.stop_reason
        if self._options.token_ids:
            choice.token_ids += output.token_ids
        if output.logprobs:
            choice.logprobs += output.logprobs
        if output.prompt_logprobs:
            self._prompts[position].logprobs += output.prompt_logprobs
        return index

    def has_news(self, index: int) -> bool:
        """Whether a chunk of this choice would show anything that none has shown yet."""
        choice = self.choices[index]
        is_shown = not choice.is_begun or choice.finish_reason is not None
        return is_shown or any(choice.text) or bool(choice.logprobs) or bool(choice.token_ids)

    def chunk(self, index: int, usage: Usage | None = None) -> dict[str, Any]:
        """What came of a choice since its last chunk, for a stream; with the usage so far if that is given."""
        chunk = {
            **self._head,
            "object": self._object(is_chunk=True),
            "choices": [self._entry(index, is_chunk=True)],
        }
        if self._options.token_ids and self._endpoint == "chat" and not self.choices[index].is_begun:
            chunk["prompt_token_ids"] = list(self._prompts[0].token_ids)
        self.choices[index].is_begun = True
        if usage is not None:
            chunk["usage"] = usage.model_dump()
        return chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that was asked to include usage."""
        return {**self._head, "object": self._object(is_chunk=True), "choices": [], "usage": usage.model_dump()}

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The complete answer."""
        answer = {
            **self._head,
            "object": self._object(is_chunk=False),
            "choices": [self._entry(index, is_chunk=False) for index in range(len(self.choices))],
            "usage": usage.model_dump(),
        }
        if self._endpoint == "chat":
            answer |= self._of_prompt(self._prompts[0])
        return answer

    def _entry(self, index: int, *, is_chunk: bool) -> dict[str, Any]:
        """What came of a choice since it was last shown."""
        choice, prompt = self.choices[index], self._prompts[index // self._num_samples]
        text = "".join(choice.text)
        if prompt.echo is not None and not choice.is_begun:
            text = prompt.echo + text
        entry: dict[str, Any] = {"index": index}
        if self._endpoint == "completions":
            entry["text"] = text
        elif is_chunk:
            entry["delta"] = {"content": text} if choice.is_begun else {"role": "assistant", "content": text}
        else:
            entry["message"] = {"role": "assistant", "content": text, "refusal": None}
        entry["logprobs"] = None if self._options.num_logprobs is None else self._logprobs(choice, prompt)
        entry["finish_reason"] = choice.finish_reason
        if choice.finish_reason is not None:
            entry["stop_reason"] = choice.stop_reason
        if self._options.token_ids:
            entry["token_ids"] = list(choice.token_ids)
        if self._endpoint == "completions" and not choice.is_begun:
            entry |= self._of_prompt(prompt)
        choice.text.clear()
        choice.token_ids.clear()
        choice.logprobs.clear()
        return entry

    def _logprobs(self, choice: Choice, prompt: Prompt) -> dict[str, Any]:
        num_top = self._options.num_logprobs or 0
        if self._endpoint == "chat":
            return chat_logprobs(choice.logprobs, num_top, self._vocabulary)
        if choice.offsets is None:
            skips = self._options.skip_special_tokens
            choice.offsets = TextOffsets(self._vocabulary, skip_special_tokens=skips)
        entries, first_prompt_token = choice.logprobs, None
        if prompt.echo is not None:
            entries = prompt.logprobs[choice.num_prompt_logprobs :] + entries
            choice.num_prompt_logprobs = len(prompt.logprobs)
            first_prompt_token = None if choice.is_begun else prompt.token_ids[0]
        return completion_logprobs(
            entries, num_top, self._vocabulary, choice.offsets, first_prompt_token=first_prompt_token
        )

    def _of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        """What was asked for of a prompt: vLLM shows it with the choices of completions and beside those of chats."""
        shown: dict[str, Any] = {}
        if self._options.num_prompt_logprobs is not None:
            num_top = self._options.num_prompt_logprobs
            shown["prompt_logprobs"] = prompt_logprobs(prompt.logprobs, num_top, self._vocabulary)
        if self._options.token_ids:
            shown["prompt_token_ids"] = list(prompt.token_ids)
        return shown

    def _object(self, *, is_chunk: bool) -> str:
        if self._endpoint == "completions":
            return "text_completion"
        return "chat.completion.chunk" if is_chunk else "chat.completion"
