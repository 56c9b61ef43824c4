"""Turns a sequence's tokens into text as they come, and ends it at a stop string.

Two things are held back: bytes that do not make a whole character yet, and text that may turn out to be the beginning
of a stop string. So what was given out never has to be taken back.
"""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_MAX_WAITING = 16
"""Tokens that may wait for the rest of a character. One has at most four bytes, so most of these make none."""
_MAX_TOKENS_OF_CHARACTER = 4


class Detokenizer:
    """State of one sequence's text."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """`decode` maps token ids to text; stop strings count after `min_tokens` tokens.

        `include_stop` makes the stop string that ends the text a part of it.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        # Decoding may depend on the token before (spaces, byte fragments), so new tokens are decoded together with
        # those of the last piece of text: `_context` is where these begin, `_read` where the new ones do.
        self._context = 0
        self._read = 0
        self._text = ""
        self._num_given = 0
        self._search_from = 0
        self.stopped_by: str | None = None
        """The stop string that ended the text, if one did."""

    @property
    def text(self) -> str:
        """All text so far, what is held back included."""
        return self._text

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, up to the one that completed the stop string."""
        return len(self._token_ids)

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Take tokens and return the text that is certain by now. After a stop string nothing more is taken.

        `is_last` gives out what was held back.
        """
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self._token_ids.append(token_id)
            self._extend_text(flush=False)
        if is_last and self.stopped_by is None:
            self._extend_text(flush=True)
        certain = len(self._text)
        if self._stop and self.stopped_by is None and not is_last:
            certain -= self._num_held_back()
        given = self._text[self._num_given : certain]
        self._num_given = max(self._num_given, certain)
        return given

    def _extend_text(self, *, flush: bool) -> None:
        """Take over new text, unless it ends inside a character, and look for a stop string in it."""
        before = self._decode(self._token_ids[self._context : self._read])
        now = self._decode(self._token_ids[self._context :])
        if len(now) > len(before) and (flush or not now.endswith(_INCOMPLETE)):
            self._text += now[len(before) :]
            self._context, self._read = self._read, len(self._token_ids)
        elif len(self._token_ids) - self._read > _MAX_WAITING:
            self._give_up_waiting(before, now)
        if len(self._token_ids) <= self._min_tokens:
            self._search_from = len(self._text)
        elif self._stop:
            self._find_stop()

    def _give_up_waiting(self, before: str, now: str) -> None:
        """Take over all but the last tokens, which may yet become a character.

        Else a sequence of bytes that make no sense would be decoded whole for each of its tokens.
        """
        end = len(self._token_ids) - _MAX_TOKENS_OF_CHARACTER
        for cut in range(end, end - _MAX_TOKENS_OF_CHARACTER, -1):  # not within a character that is whole
            settled = self._decode(self._token_ids[self._context : cut])
            if len(settled) >= len(before) and settled + self._decode(self._token_ids[cut:]) == now:
                self._text += settled[len(before) :]
                self._context = self._read = cut
                return

    def _find_stop(self) -> None:
        start = max(self._search_from, self._num_given - self._longest_stop)
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, start)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._text = self._text[: at + len(self.stopped_by)] if self._include_stop else self._text[:at]

    def _num_held_back(self) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        longest = min(self._longest_stop - 1, len(self._text) - self._search_from)
        for length in range(longest, 0, -1):
            tail = self._text[len(self._text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
