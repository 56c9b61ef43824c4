"""Log probabilities in the shapes that the OpenAI API, and vLLM for prompts, give them."""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from pagoda.worker.types import TokenLogprobs

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Vocabulary(Protocol):
    """What tokens stand for; see `worker/vocabulary.py`."""

    def is_special(self, token_id: int) -> bool: ...

    def bytes_of(self, token_id: int) -> bytes: ...

    def text_of(self, token_id: int) -> str: ...


class TextOffsets:
    """Where in one choice's text each of its tokens begins; tokens come in order."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def push(self, token_id: int) -> int:
        offset = self._length
        if not (self._skip_special_tokens and self._vocabulary.is_special(token_id)):
            # A character counts where its last byte comes.
            self._length += len(self._decoder.decode(self._vocabulary.bytes_of(token_id)))
        return offset


def chat_logprobs(entries: Sequence[TokenLogprobs], num_top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """As in chat completions."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": vocabulary.text_of(token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(vocabulary.bytes_of(token_id)),
        }

    content = [
        {**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(*top) for top in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs],
    num_top: int,
    vocabulary: Vocabulary,
    offsets: TextOffsets,
    *,
    first_prompt_token: int | None = None,
) -> dict[str, Any]:
    """As in completions. A prompt that is echoed begins with a token that has no log probability."""
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    if first_prompt_token is not None:
        tokens.append(vocabulary.text_of(first_prompt_token))
        token_logprobs.append(None)
        top_logprobs.append(None)
        text_offset.append(offsets.push(first_prompt_token))
    for entry in entries:
        own = (entry.token_id, entry.logprob)
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[:num_top], own):
            top.setdefault(vocabulary.text_of(token_id), max(logprob, _LEAST))  # of equal texts, the most probable
        tokens.append(vocabulary.text_of(entry.token_id))
        token_logprobs.append(max(entry.logprob, _LEAST))
        top_logprobs.append(top)
        text_offset.append(offsets.push(entry.token_id))
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], num_top: int, vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """As vLLM's `prompt_logprobs`: by token id, null for the first token of the prompt."""
    shown: list[dict[str, Any] | None] = [None]
    for entry in entries:
        candidates = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
        shown.append(
            {
                str(token_id): {
                    "logprob": max(logprob, _LEAST),
                    "rank": rank,
                    "decoded_token": vocabulary.text_of(token_id),
                }
                for token_id, logprob, rank in (*candidates, (entry.token_id, entry.logprob, entry.rank))
            }
        )
    return shown
