"""Encodes with a Hugging Face `tokenizers` tokenizer, and says where a text may be cut (`EncodedText`).

Not through `transformers`, which takes longer to pack a result into Python objects than it takes to make it; and in
batches of one text, since encoding a single one would hold the interpreter's lock and so stop the event loop.
"""

import copy
from array import array
from typing import Any

from pagoda.worker.token_cache import EncodedText

_MIN_LOOKAHEAD = 16
_PROBES = ("A probe: é 日本語 🙂", "x", " y  z\n")


class TextEncoder:
    """Encodes text without the special tokens that a model puts around it; those in the text itself count."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`; it must not change any more."""
        if "trim_offsets=True" in repr(backend.post_processor):
            # It would leave the space before a word out of the word's offsets.
            backend = copy.deepcopy(backend)
            backend.post_processor = None
        self._backend = backend
        self._has_normalizer = backend.normalizer is not None
        self._cuts_words = backend.pre_tokenizer is None and _is_plain_bpe(backend.model)
        added = backend.get_added_tokens_decoder().values()
        self.lookahead = max([_MIN_LOOKAHEAD, *(len(token.content) for token in added)])
        """Characters behind a token that may take part in deciding it."""

    def ids(self, text: str) -> list[int]:
        """The tokens alone, in half the time; almost all of it without the interpreter's lock. For any thread."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def encode(self, text: str) -> EncodedText:
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        seam_tokens, seam_chars = array("I", [0]), array("I", [0])
        end, last_word = 1, None  # a seam at 0 is there already
        for index, ((begin, token_end), word) in enumerate(zip(encoding.offsets, encoding.word_ids, strict=True)):
            is_seam = begin >= end and (self._cuts_words or word != last_word)
            # A normalizer may join a character with those before it, but no ASCII one.
            if is_seam and not (self._has_normalizer and not text[begin].isascii()):
                seam_tokens.append(index)
                seam_chars.append(begin)
                end = begin + 1
            end, last_word = max(end, token_end), word
        return EncodedText(array("I", encoding.ids), seam_tokens, seam_chars)


def text_encoder_for(tokenizer: Any) -> TextEncoder | None:
    """An encoder that gives what the `transformers` tokenizer gives, or None if there can be none.

    There is none for tokenizers written in Python, and for those that choose at random.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(backend.model, "dropout", None) or backend.truncation or backend.padding:
        return None
    encoder = TextEncoder(backend)
    probes = [*_PROBES, *(token.content + "x" for token in list(backend.get_added_tokens_decoder().values())[:8])]
    agrees = all(
        encoder.encode(probe).ids.tolist() == tokenizer.encode(probe, add_special_tokens=False) for probe in probes
    )
    return encoder if agrees else None


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The special tokens that a tokenizer puts before and behind every text. None if they depend on the text."""
    found = None
    for probe in _PROBES:
        bare, dressed = tokenizer.encode(probe, add_special_tokens=False), tokenizer.encode(probe)
        num_before = next((n for n in range(len(dressed)) if dressed[n : n + len(bare)] == bare), None)
        if num_before is None:
            return None
        around = dressed[:num_before], dressed[num_before + len(bare) :]
        if found not in (None, around):
            return None
        found = around
    return found


def _is_plain_bpe(model: Any) -> bool:
    """Whether a token between two merges' ends depends on nothing else; see `token_cache`."""
    return (
        type(model).__name__ == "BPE"
        and not model.ignore_merges
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )
