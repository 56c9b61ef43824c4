"""Tokens of texts that begin like earlier ones: a chat's history is tokenised once, not again on every turn.

    earlier text   |--- reused ---|== overlap ==|- may depend on what follows -|
    new text       |--- reused ---|== overlap ==|- ... ------------------------------------ new -----|
                                  |------------------------- encoded -------------------------------|

A *seam* is a place between two tokens where a text may be cut: whoever encodes says where they are. The new text is
encoded from a seam some way before the point where the two texts part. In the overlap, seams and tokens must come out
as they are remembered, but for the first few, which may feel that their left neighbour is missing (a tokenizer may put
a space before the first word). If they do not, the cut moves back; after a few moves the whole text is encoded.

Why that gives what encoding the whole gives: pre-tokenizers scan from left to right, so where both texts have the same
word boundary and words before it were not decided by what lies behind `lookahead` characters, both scans go on alike,
and words are encoded each for itself. In byte-pair encoding one token at the same place in both parts is enough, even
within a word: a merge across its ends would have happened in one of the parts too.

Standard library only. For one thread at a time.
"""

from __future__ import annotations  # `array[int]` is for type checkers only before Python 3.12

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_CHUNK_CHARS = 128
"""Texts are found by their beginnings of a multiple of this length."""
_MIN_CHARS = 4 * _CHUNK_CHARS
"""Shorter texts are not worth remembering."""
_OVERLAP_CHARS = (64, 512, 4096)
_MIN_UNITS = 4
"""What must come out the same in an overlap: pieces between two seams."""
_MAX_SKIPPED = 16
"""Seams at the beginning of an overlap at which the tokens may still differ."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Tokens of a text and where it may be cut."""

    ids: array[int]
    seam_tokens: array[int]
    """Before which tokens a seam is; starts with 0."""
    seam_chars: array[int]
    """Where these seams are in the text, strictly ascending; starts with 0."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    text: str
    encoded: EncodedText
    keys: list[int]


class TokenCache:
    """Encodes texts, the more quickly the more of one it has seen before."""

    def __init__(self, encode: Callable[[str], EncodedText], *, lookahead: int, max_chars: int = 2**23) -> None:
        """
        Args:
            encode: encodes a text from its beginning; no token of it may depend on an earlier call.
            lookahead: characters behind a token that may take part in deciding it, such as the longest special token.
            max_chars: characters of all remembered texts; the texts that were not used for longest are forgotten.
        """
        self._encode = encode
        self._lookahead = lookahead
        self._max_chars = max_chars
        self._num_chars = 0
        self._texts: OrderedDict[str, _Remembered] = OrderedDict()
        self._by_beginning: dict[int, _Remembered] = {}

    @property
    def num_chars(self) -> int:
        """Characters of the texts that are remembered."""
        return self._num_chars

    def encode(self, text: str) -> list[int]:
        """The same token ids as `encode(text)`."""
        if len(text) < _MIN_CHARS:
            return self._encode(text).ids.tolist()
        keys = _keys(text)
        similar = next((found for key in reversed(keys) if (found := self._by_beginning.get(key))), None)
        encoded = None
        if similar is not None:
            self._texts.move_to_end(similar.text)
            num_shared = _num_shared(text, similar.text)
            if num_shared == len(text) == len(similar.text):
                return similar.encoded.ids.tolist()
            encoded = self._extend(similar.encoded, num_shared, text)
            if encoded is not None and num_shared == len(similar.text):
                self._forget(similar)  # the new text does all that it did
        if encoded is None:
            encoded = self._encode(text)
        self._remember(_Remembered(text, encoded, keys))
        return encoded.ids.tolist()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the books do not agree."""
        assert self._num_chars == sum(map(len, self._texts)) <= self._max_chars
        assert all(self._texts.get(found.text) is found for found in self._by_beginning.values())
        assert all(key in found.keys for key, found in self._by_beginning.items())

    def _extend(self, known: EncodedText, num_shared: int, text: str) -> EncodedText | None:
        """Encode `text`, whose first `num_shared` characters are those of a known text. None if no seam holds."""
        last = bisect_right(known.seam_chars, num_shared - self._lookahead) - 1
        for overlap in _OVERLAP_CHARS:
            cut = bisect_right(known.seam_chars, num_shared - self._lookahead - overlap) - 1
            if cut <= 0:
                return None
            rest = self._encode(text[known.seam_chars[cut] :])
            if (joined := _join(known, cut, last, rest)) is not None:
                return joined
        return None

    def _remember(self, entry: _Remembered) -> None:
        if len(entry.text) > self._max_chars:
            return
        if (same := self._texts.get(entry.text)) is not None:
            self._forget(same)
        self._texts[entry.text] = entry
        self._num_chars += len(entry.text)
        self._by_beginning.update(dict.fromkeys(entry.keys, entry))
        while self._num_chars > self._max_chars:
            self._forget(next(iter(self._texts.values())))

    def _forget(self, entry: _Remembered) -> None:
        del self._texts[entry.text]
        self._num_chars -= len(entry.text)
        for key in entry.keys:
            if self._by_beginning.get(key) is entry:
                del self._by_beginning[key]


def _join(known: EncodedText, cut: int, last: int, rest: EncodedText) -> EncodedText | None:
    """`known` up to a seam in the overlap and `rest` from there on; None if they differ between there and its end.

    Args:
        cut: index of the seam of `known` where `rest` begins.
        last: index of the seam of `known` where the overlap ends.
    """
    begin = known.seam_chars[cut]
    for at in range(cut, min(last - _MIN_UNITS, cut + _MAX_SKIPPED) + 1):
        there = bisect_left(rest.seam_chars, known.seam_chars[at] - begin)
        end = there + last - at
        if end >= len(rest.seam_chars):
            return None
        token, token_there = known.seam_tokens[at], rest.seam_tokens[there]
        if (
            _moved(known.seam_chars[at : last + 1], -begin) == rest.seam_chars[there : end + 1]
            and _moved(known.seam_tokens[at : last + 1], token_there - token) == rest.seam_tokens[there : end + 1]
            and known.ids[token : known.seam_tokens[last]] == rest.ids[token_there : rest.seam_tokens[end]]
        ):
            return EncodedText(
                ids=known.ids[:token] + rest.ids[token_there:],
                seam_tokens=known.seam_tokens[:at] + _moved(rest.seam_tokens[there:], token - token_there),
                seam_chars=known.seam_chars[:at] + _moved(rest.seam_chars[there:], begin),
            )
    return None


def _moved(positions: array[int], by: int) -> array[int]:
    return array("I", [position + by for position in positions])


def _keys(text: str) -> list[int]:
    """A key for each beginning of the text that is a whole number of chunks long."""
    key, keys = 0, []
    for end in range(_CHUNK_CHARS, len(text) + 1, _CHUNK_CHARS):
        key = hash((key, text[end - _CHUNK_CHARS : end]))
        keys.append(key)
    return keys


def _num_shared(one: str, other: str) -> int:
    """Characters with which both texts begin."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
