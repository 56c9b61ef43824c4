"""Events, however they are cut and whatever their lines end in."""

import pytest

from pagoda.cluster.openai_stream import (
    EventSplitter,
    NotAnEventError,
    StreamEvent,
    Usage,
    parse_event,
    problem_with_type,
)

STREAM = (
    b': hello\n\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    b'data: {"choices": [{"delta":\ndata: {"content": "H\xc3\xa9"}}]}\n\n'
    b'event: x\ndata: {"choices": [{"delta": null, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
)
EVENTS = [StreamEvent(), StreamEvent(), StreamEvent("Hé"), StreamEvent(finish_reason="stop"), StreamEvent(is_done=True)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_cut_anywhere(line_end: bytes, bom: bytes, size: int) -> None:
    splitter, data, events = EventSplitter(), bom + STREAM.replace(b"\n", line_end), []
    for start in range(0, len(data), size):
        events += [parse_event(event) for event in splitter.feed(data[start : start + size])]
    assert not splitter.rest.strip()
    assert events == EVENTS


def test_all_that_an_event_may_say() -> None:
    assert parse_event(
        b'data: {"choices": [{"text": "a", "finish_reason": null}, {"delta": {"reasoning": "b"}}], '
        b'"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}}'
    ) == StreamEvent("a", "b", usage=Usage(3, 2, 1))
    assert parse_event(b'data: {"error": {"message": "no"}}').error == "no"
    assert parse_event(b'data: {"error": "no"}').error == '"no"'


def test_counts_that_a_server_does_not_know() -> None:
    """The answer is good all the same."""
    for usage in (b"{}", b'{"prompt_tokens": null, "completion_tokens": null}'):
        assert parse_event(b'data: {"choices": [], "usage": %b}' % usage) == StreamEvent(usage=Usage(None, None, None))


def test_lines_that_hold_no_data() -> None:
    for line in (b"event", b"event: x", b": comment", b":", b"id: 7", b"retry: 5"):
        assert parse_event(line) == StreamEvent()


def test_type_of_what_is_no_stream() -> None:
    assert problem_with_type("text/event-stream; charset=utf-8") == ""
    assert problem_with_type("text/html; charset=utf-8") == "the server answers text/html, not an event stream"
    assert problem_with_type(None) == "the server answers something, not an event stream"


@pytest.mark.parametrize(
    "data",
    [
        b"<html>", b'{"error": {"message": "no"}}',
        b"data: {", b"data: 7", b"data: {}", b"data: " + b"[" * 100_000, b'data: {"choices": 5}',
        b'data: {"choices": ["x"]}', b'data: {"choices": [{"delta": {"content": 5}}]}', b'data: {"choices": [{}]}',
        b'data: {"choices": [{"text": "a", "finish_reason": 1}]}', b'data: {"choices": [], "usage": 5}',
        b'data: {"choices": [], "usage": {"prompt_tokens": "5"}}',
        b'data: {"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": 5}}',
    ],
)  # fmt: skip
def test_what_is_no_event(data: bytes) -> None:
    with pytest.raises(NotAnEventError):
        parse_event(data)
