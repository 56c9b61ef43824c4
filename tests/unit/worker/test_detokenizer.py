"""From tokens to text: stop strings never show, nothing is ever taken back."""

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.worker.detokenizer import Detokenizer
from pagoda.worker.text_decoder import ByteDecoder


def run(
    tokens: Sequence[str | bytes], *, stop: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """Push token by token. Returns what came out each time, and the stop string that ended it."""
    vocabulary = [token.encode() if isinstance(token, str) else token for token in tokens]
    decoder = ByteDecoder(vocabulary.__getitem__)
    detokenizer = Detokenizer(decoder, stop=stop, min_tokens=min_tokens, include_stop=include_stop)
    pieces = [detokenizer.push([index], is_last=index + 1 == len(vocabulary)) for index in range(len(vocabulary))]
    return pieces, detokenizer.stopped_by


def test_plain_text_is_not_delayed() -> None:
    """Without stop strings, each token's text comes out with the token."""
    assert run(["Hel", "lo", " you"]) == (["Hel", "lo", " you"], None)


def test_several_tokens_at_once() -> None:
    """Speculative decoding or a slow reader brings many tokens in one push."""
    detokenizer = Detokenizer(ByteDecoder([b"a\xc3", b"\xa9", b"b"].__getitem__))
    assert detokenizer.push([0, 1, 2]) == "aéb"
    assert detokenizer.push([]) == ""


def test_stop_string_across_tokens_is_never_half_shown() -> None:
    """What may begin the stop string is held back; it and what follows never come out."""
    assert run(["Hi S", "T", "OP", " there"], stop=["STOP"]) == (["Hi ", "", "", ""], "STOP")


def test_held_back_text_that_turns_out_harmless() -> None:
    """The beginning of a stop string comes out as soon as it cannot become one."""
    assert run(["S", "T", "AR", "!"], stop=["STOP"]) == (["", "", "STAR", "!"], None)


def test_held_back_text_comes_out_at_the_end() -> None:
    """The answer ends with what might have become a stop string."""
    assert run(["ab", "ST"], stop=["STOP"]) == (["ab", "ST"], None)


def test_stop_string_inside_one_token() -> None:
    assert run(["a.b", "c"], stop=["."]) == (["a", ""], ".")


def test_stop_string_that_is_part_of_the_text() -> None:
    """On request it shows, and nothing behind it; until it is whole it is held back all the same."""
    assert run(["Hi S", "T", "OP there", "!"], stop=["STOP"], include_stop=True) == (["Hi ", "", "STOP", ""], "STOP")
    assert run(["a.b.c"], stop=[".", "b"], include_stop=True) == (["a."], ".")


def test_stop_string_of_a_split_character() -> None:
    """A stop string outside ASCII is found although its bytes come apart."""
    assert run([b"a\xe3", b"\x80", b"\x82", "b"], stop=["。"]) == (["a", "", "", ""], "。")


def test_earliest_of_several_stop_strings() -> None:
    """Two stop strings in one token: the one that comes first in the text counts, not the one listed first."""
    assert run(["one, two. three"], stop=[".", ","]) == (["one"], ",")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xaab", ("x", "aab")),  # "ab" is in it too, later
        ("xab", ("x", "ab")),
        ("xaaab", ("xa", "aab")),  # the first "a" looked like the beginning of "aab"
        ("xaac", ("xaac", None)),
    ],
)
@pytest.mark.parametrize("stop", [["aab", "ab"], ["ab", "aab"]])
def test_overlapping_stop_strings(text: str, expected: tuple[str, str | None], stop: list[str]) -> None:
    """One stop string is the end of another: letter by letter and whole, in either order, the result is the same."""
    for tokens in (list(text), [text]):
        pieces, stopped_by = run(tokens, stop=stop)
        assert ("".join(pieces), stopped_by) == expected


def test_stop_strings_count_after_min_tokens() -> None:
    """A stop string within the first `min_tokens` tokens is text like any other; the next one ends the answer."""
    assert run(["a", ".", "b", ".", "c"], stop=["."], min_tokens=2) == (["a", ".", "b", "", ""], ".")


def test_nothing_waits_within_min_tokens() -> None:
    """What no stop string may begin with is not held back either, and does not become part of one later."""
    assert run(["S", "TOP", "!"], stop=["STOP"], min_tokens=1) == (["S", "TOP", "!"], None)


def test_min_tokens_reached_only_by_the_last_token() -> None:
    """The last of `min_tokens` tokens ends inside a character, so its text comes out at the end. No stop counts yet."""
    assert run(["a", b".\xe6"], stop=["."], min_tokens=2) == (["a", ".\ufffd"], None)


def test_nothing_is_taken_after_a_stop_string() -> None:
    detokenizer = Detokenizer(ByteDecoder([b"a.", b"b"].__getitem__), stop=["."])
    assert [detokenizer.push([0, 1]), detokenizer.push([1]), detokenizer.push([], is_last=True)] == ["a", "", ""]
    assert detokenizer.num_tokens == 1


def expected_text(tokens: Sequence[bytes], stop: Sequence[str], min_tokens: int) -> tuple[str, str | None, list[str]]:
    """The specification, with everything decoded from the start each time.

    Returns the text, the stop string that ended it, and the whole characters known after each token.
    """
    ignored, history = 0, []
    for num_tokens in range(1, len(tokens) + 2):
        is_flush = num_tokens > len(tokens)
        known = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens[:num_tokens]), is_flush)
        if min(num_tokens, len(tokens)) <= min_tokens:
            ignored = len(known)
        elif found := [(at, s) for s in stop if (at := known.find(s, ignored)) >= 0]:
            at, stopped_by = min(found)
            return known[:at], stopped_by, history
        history.append(known)
    return history[-1], None, history


@given(
    # Text of few letters, so that stop strings occur, cut anywhere, mixed with bytes that make no sense.
    tokens=st.lists(
        st.one_of(
            st.sampled_from([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", "é".encode(), "🙂".encode()[:2], b""]),
            st.binary(max_size=3),
        ),
        max_size=12,
    ),
    stop=st.lists(st.text("abé\ufffd", min_size=1, max_size=4), max_size=4),
    min_tokens=st.integers(0, 4),
    push_sizes=st.lists(st.integers(0, 3), max_size=12),
)
def test_any_split_into_tokens_and_pushes(
    tokens: list[bytes], stop: list[str], min_tokens: int, push_sizes: list[int]
) -> None:
    """The pieces make up the specified text; none is ever taken back; only what may become a stop string waits."""
    token_ids = list(range(len(tokens)))
    text, stopped_by, known = expected_text(tokens, stop, min_tokens)
    detokenizer = Detokenizer(ByteDecoder(tokens.__getitem__), stop=stop, min_tokens=min_tokens)
    given_out, begin = "", 0
    for size in push_sizes:
        given_out += detokenizer.push(token_ids[begin : begin + size])
        begin = min(begin + size, len(tokens))
        assert text.startswith(given_out)
        if 0 < begin <= len(known):
            waiting = known[begin - 1].removeprefix(given_out)
            assert not waiting or any(s.startswith(waiting) for s in stop)
    given_out += detokenizer.push(token_ids[begin:], is_last=True)
    assert (given_out, detokenizer.stopped_by) == (text, stopped_by)
