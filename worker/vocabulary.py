"""What each token id stands for, byte by byte.

A token may be a part of a character, so its bytes are the truth and its text is not: several tokens' bytes joined are
the text, several tokens' texts joined need not be.
"""

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece vocabularies spell a single byte."""


class Vocabulary:
    """Of a Hugging Face tokenizer. Thread-safe; remembers what it was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        # Not all that text leaves out has a role, and so a name, as Llama 3's header tokens have not.
        unnamed = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special = frozenset(tokenizer.all_special_ids).union(unnamed)
        decoders = _decoders(tokenizer)
        self._spells_bytes = "ByteLevel" in decoders
        self.joins_bytes = set(decoders) - {"Fuse"} == {"ByteLevel"}
        """Whether a text's bytes are those of its tokens joined, whatever stands before."""
        self._bytes: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether text leaves this token out by default."""
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """The token's share of the UTF-8 text; nothing for ids that the tokenizer does not know."""
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def visible_bytes_of(self, token_id: int) -> bytes:
        """The same, and nothing for special tokens."""
        return b"" if token_id in self._special else self.bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        """The token's text, U+FFFD where it is a part of a character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._spells_bytes:
            is_spelled = all(character in _BYTE_OF for character in piece)
            return bytes(map(_BYTE_OF.__getitem__, piece)) if is_spelled else str(piece).encode()
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _decoders(tokenizer: Any) -> list[str]:
    """The types of the steps that make text of a list of tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return []
    return [str(step["type"]) for step in decoder.get("decoders", [decoder])]


def _byte_alphabet() -> dict[str, int]:
    """The character that GPT-2's vocabulary writes for each byte: itself if visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
