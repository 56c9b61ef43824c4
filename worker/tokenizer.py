"""Text to tokens and back, with the model's own tokenizer and chat template."""

import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pagoda.worker.chat_options import ChatOptions
from pagoda.worker.errors import InvalidRequestError, ModelError
from pagoda.worker.text_decoder import ByteDecoder, TextDecoder, WindowDecoder
from pagoda.worker.text_encoder import text_encoder_for, tokens_around
from pagoda.worker.token_cache import TokenCache
from pagoda.worker.vocabulary import Vocabulary

ChatMessage = Mapping[str, Any]

MAX_UNBOUNDED_CHARS = 2**19
"""Of a text that need not fit the model: a second's work."""
_PROBE_CHARS = 8
"""Characters per token of the prefix that shows whether a long text can fit."""
_MOST_CHARS = 16
"""Characters per token that no text has on average."""
_SEAM_TOKENS = 16
"""What cutting a text may add to its tokens."""

_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What a template can raise: its own refusal, or Python's when values are not what it expects."""

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def check_tokenizer(folder: Path) -> None:
    """Raise `ModelError` if a model folder has no tokenizer; loading one takes seconds."""
    if not any((folder / name).is_file() for name in _FILES):
        raise ModelError(f"{folder}: no tokenizer: none of {', '.join(_FILES)} is there")


class Tokenizer:
    """A Hugging Face tokenizer. Encoding with `max_tokens` is for one thread at a time; all else for any."""

    def __init__(self, folder: Path) -> None:
        """Load it from a model folder. Raises `ModelError` if the folder has none."""
        from transformers import AutoTokenizer

        self._tokenizer: Any
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever wrong files make of the library's code
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise ModelError(f"{folder}: its tokenizer cannot be loaded: {reason}") from error
        self.vocabulary = Vocabulary(self._tokenizer)
        self._encoder = encoder = text_encoder_for(self._tokenizer)
        self._cache = TokenCache(encoder.encode, lookahead=encoder.lookahead) if encoder is not None else None
        self._around = tokens_around(self._tokenizer)
        self._backend = self._tokenizer.backend_tokenizer if encoder is not None else None
        self._wrapper_lock = threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """Token ids of a plain prompt, by default with the special tokens that the model puts around one.

        Raises `InvalidRequestError` naming `field`, before most of the work, for a text that is far longer than
        `max_tokens`; without one, for a text of more than `MAX_UNBOUNDED_CHARS`. Those with one are remembered, since
        the next turn of a conversation begins with them.
        """
        self._check_length(text, max_tokens, field)
        if self._encoder is None or self._cache is None or self._around is None:
            with self._wrapper_lock:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids
        before, behind = self._around if add_special_tokens else ((), ())
        inner = self._encoder.ids(text) if max_tokens is None else self._cache.encode(text)
        return [*before, *inner, *behind]

    def encode_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions | None = None, *, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a conversation, by default up to where the assistant's answer begins.

        Raises `InvalidRequestError` if there is no chat template or it refuses the messages, and as `encode` does.
        """
        options = options or ChatOptions()
        if not self.has_chat_template:
            raise InvalidRequestError("messages", "this model has no chat template; use completions")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError("messages", f"the model's chat template refuses them: {error}") from error
        return self.encode(text, add_special_tokens=options.add_special_tokens, max_tokens=max_tokens, field="messages")

    def _check_length(self, text: str, max_tokens: int | None, field: str) -> None:
        if max_tokens is None:
            if len(text) > MAX_UNBOUNDED_CHARS:
                raise InvalidRequestError(field, f"may have {MAX_UNBOUNDED_CHARS} characters, not {len(text)}")
            return
        probe_chars = _PROBE_CHARS * max_tokens
        if len(text) <= probe_chars:
            return
        if len(text) > _MOST_CHARS * max_tokens + MAX_UNBOUNDED_CHARS or (
            self._num_tokens(text[:probe_chars]) > max_tokens + _SEAM_TOKENS
        ):
            raise InvalidRequestError(
                field, f"has far more tokens than the {max_tokens} that prompt and output together may have"
            )

    def _num_tokens(self, text: str) -> int:
        if self._encoder is not None:
            return len(self._encoder.ids(text))
        with self._wrapper_lock:
            return len(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens, by default without special ones. Incomplete characters come out as U+FFFD."""
        if self._backend is not None:  # a fifth of the time that the wrapper takes
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        """For the text of one sequence that comes token by token."""
        vocabulary = self.vocabulary
        if vocabulary.joins_bytes:
            return ByteDecoder(vocabulary.visible_bytes_of if skip_special_tokens else vocabulary.bytes_of)
        return WindowDecoder(functools.partial(self.decode, skip_special_tokens=skip_special_tokens))
