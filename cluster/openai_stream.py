"""What OpenAI servers stream, whoever made them: server-sent events that hold pieces of an answer."""

import json
from dataclasses import dataclass
from typing import Any

_BOM = b"\xef\xbb\xbf"
_OTHER_FIELDS = (b"", b"event", b"id", b"retry")
"""Names of lines that hold no data; comments have none."""
_MAX_QUOTED = 200


def problem_with_type(content_type: str | None) -> str:
    """What an answer without one event is, for who asked for a stream; empty if it says that it is a stream."""
    kind = (content_type or "").partition(";")[0].strip()
    return "" if kind == "text/event-stream" else f"the server answers {kind or 'something'}, not an event stream"


class NotAnEventError(ValueError):
    """A server sends what is no event of an answer."""


class EventSplitter:
    """Takes bytes as they come and gives whole events. Lines may end in LF, CRLF or CR."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_begun = False

    @property
    def rest(self) -> bytes:
        """What has come of the next event."""
        return self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole with `data`."""
        data = self._rest + data
        if not self._is_begun and len(data) >= len(_BOM):
            data = data.removeprefix(_BOM)
            self._is_begun = True
        # Behind a CR at the end an LF may still come, except where lines end in CR alone.
        held_back = b"\r" if data.endswith(b"\r") and not data.endswith(b"\r\r") else b""
        data = data.removesuffix(held_back).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held_back
        return events


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counts them; None of what it does not say."""

    num_prompt_tokens: int | None
    num_output_tokens: int | None
    num_cached_tokens: int | None


@dataclass(slots=True)  # not frozen: to make a frozen one takes four times as long, and one is made for each token
class StreamEvent:
    """One event. All choices of it together."""

    text: str = ""
    reasoning: str = ""
    """Thoughts that some servers send apart."""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    """The server's own words."""
    is_done: bool = False
    """Nothing follows."""


def parse_event(event: bytes) -> StreamEvent:
    """An event as `EventSplitter` gives them; an empty one for comments. Raises `NotAnEventError`."""
    lines = event.strip().split(b"\n")
    data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
    if not data:
        if event.strip() and not all(line.partition(b":")[0] in _OTHER_FIELDS for line in lines):
            raise NotAnEventError(f"not an event: {_quoted(event)}")
        return StreamEvent()
    if data == b"[DONE]":
        return StreamEvent(is_done=True)
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"not JSON: {_quoted(data)}") from error
    try:
        return _parse_chunk(chunk)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotAnEventError(f"not an event of an answer, {type(error).__name__}: {_quoted(data)}") from error


def may_begin_event(data: bytes) -> bool:
    """Whether `data` may be the beginning of an event of which the rest is missing."""
    name, colon, _ = data.lstrip().partition(b"\n")[0].partition(b":")
    names = (b"data", *_OTHER_FIELDS)
    return name in names if colon else any(known.startswith(name) for known in names)


def _parse_chunk(chunk: Any) -> StreamEvent:
    if (error := chunk.get("error")) is not None:
        message = error.get("message") if isinstance(error, dict) else None
        return StreamEvent(error=message if isinstance(message, str) else json.dumps(error))
    usage = chunk.get("usage")
    text, reasoning, finish_reason = "", "", None
    for choice in chunk["choices"]:
        if "delta" in choice:
            delta = choice["delta"] or {}
            text += _text(delta.get("content"))
            reasoning += _text(delta.get("reasoning_content") or delta.get("reasoning"))
        else:
            text += _text(choice["text"])
        reason = choice.get("finish_reason")
        if not isinstance(reason, str | None):
            raise TypeError("finish_reason is a string")
        finish_reason = reason or finish_reason
    return StreamEvent(text, reasoning, finish_reason, None if usage is None else _parse_usage(usage))


def _parse_usage(usage: Any) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    told = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
    return Usage(*(None if value is None else count(value) for value in told))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("text is a string")
    return value.encode(errors="replace").decode()  # half a surrogate pair can be neither shown nor sent


def count(value: Any) -> int:
    """A number of tokens. Raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError("not a count")
    return value


def _quoted(data: bytes) -> str:
    return data[:_MAX_QUOTED].decode(errors="replace")
