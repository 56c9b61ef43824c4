"""Turns a sequence's tokens into text as they come, and ends it at a stop string.

Text that may turn out to be the beginning of a stop string is held back, so what was given out never has to be taken
back.
"""

from collections.abc import Sequence

from pagoda.worker.text_decoder import TextDecoder


class Detokenizer:
    """State of one sequence's text."""

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """`decoder` is this sequence's own; stop strings count after `min_tokens` tokens.

        `include_stop` makes the stop string that ends the text a part of it.
        """
        self._decoder = decoder
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held_back = ""
        self.num_tokens = 0
        """Tokens taken so far, up to the one that completed the stop string."""
        self.stopped_by: str | None = None
        """The stop string that ended the text, if one did."""

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Take tokens and return the text that is certain by now. After a stop string nothing more is taken.

        `is_last` gives out what was held back.
        """
        certain = ""
        for token_id in token_ids:
            if self.stopped_by is not None:
                return certain
            self.num_tokens += 1
            certain += self._until_stop(self._decoder.push(token_id))
        if is_last and self.stopped_by is None:
            certain += self._until_stop(self._decoder.flush()) + self._held_back
            self._held_back = ""
        return certain

    def _until_stop(self, text: str) -> str:
        """What is certain now that this text has come."""
        if not self._stop or self.num_tokens <= self._min_tokens:
            return text
        text = self._held_back + text
        if found := [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]:
            at, self.stopped_by = min(found)
            self._held_back = ""
            return text[: at + len(self.stopped_by)] if self._include_stop else text[:at]
        num_certain = len(text) - self._num_undecided(text)
        self._held_back = text[num_certain:]
        return text[:num_certain]

    def _num_undecided(self, text: str) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
