"""Turns tokens into text one by one. A character comes out once all of its bytes are there.

Vocabularies of bytes (GPT-2's, Llama 3's, Qwen's) are joined byte by byte. Others depend on the token before, as where
the first word of a text has no space: they are decoded again together with the tokens of the last piece.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"
_MAX_WAITING = 16
"""Tokens that may wait for the rest of a character. One has at most four bytes, so most of these make none."""
_MAX_TOKENS_OF_CHARACTER = 4

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextDecoder(Protocol):
    """State of one sequence's text. All that it gives out, joined, is the text of the tokens that it took."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is whole with it."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for the beginning of a character."""
        ...


class ByteDecoder:
    """For vocabularies in which every token stands for some bytes of UTF-8, wherever it is."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` gives a token's bytes."""
        self._bytes_of = bytes_of
        self._decode = _utf8_decoder("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDecoder:
    """For any vocabulary: new tokens are decoded with those of the last piece of text before them, and without."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` maps token ids to text, U+FFFD where bytes make no character."""
        self._decode = decode
        self._token_ids: list[int] = []
        """Those of the last piece, then the new ones."""
        self._num_read = 0
        """Of the last piece."""

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return self._new_text(is_last=False)

    def flush(self) -> str:
        return self._new_text(is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        before = self._decode(self._token_ids[: self._num_read])
        now = self._decode(self._token_ids)
        if len(now) > len(before) and (is_last or not now.endswith(_INCOMPLETE)):
            del self._token_ids[: self._num_read]
            self._num_read = len(self._token_ids)
            return now[len(before) :]
        if len(self._token_ids) - self._num_read > _MAX_WAITING:
            return self._give_up_waiting(before, now)
        return ""

    def _give_up_waiting(self, before: str, now: str) -> str:
        """Give out all but the last tokens, which may yet become a character.

        Else a sequence of bytes that make no sense would be decoded whole for each of its tokens.
        """
        end = len(self._token_ids) - _MAX_TOKENS_OF_CHARACTER
        for cut in range(end, end - _MAX_TOKENS_OF_CHARACTER, -1):  # not within a character that is whole
            settled = self._decode(self._token_ids[:cut])
            if len(settled) >= len(before) and settled + self._decode(self._token_ids[cut:]) == now:
                del self._token_ids[:cut]
                self._num_read = 0
                return settled[len(before) :]
        return ""
