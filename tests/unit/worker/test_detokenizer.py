"""From tokens to text: characters come out whole, stop strings never show, nothing is ever taken back."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_byte_tokenizer

from pagoda.worker.detokenizer import Detokenizer
from pagoda.worker.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]


def byte_decode(vocabulary: Sequence[bytes]) -> Decode:
    """Byte-level decoding, as tokenizers do it: tokens are bytes, and what makes no character becomes U+FFFD."""
    return lambda token_ids: b"".join(vocabulary[token_id] for token_id in token_ids).decode(errors="replace")


def word_decode(token_ids: Sequence[int]) -> str:
    """Decoding that depends on what comes before: words are joined by spaces, but the first one has none."""
    return " ".join(["zero", "one", "two", "three"][token_id] for token_id in token_ids)


def run(
    tokens: Sequence[str | bytes], *, stop: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """Push token by token. Returns what came out each time, and the stop string that ended it."""
    vocabulary = [token.encode() if isinstance(token, str) else token for token in tokens]
    detokenizer = Detokenizer(byte_decode(vocabulary), stop=stop, min_tokens=min_tokens, include_stop=include_stop)
    pieces = [detokenizer.push([index], is_last=index + 1 == len(vocabulary)) for index in range(len(vocabulary))]
    return pieces, detokenizer.stopped_by


def test_plain_text_is_not_delayed() -> None:
    """Without stop strings, each token's text comes out with the token."""
    assert run(["Hel", "lo", " you"]) == (["Hel", "lo", " you"], None)


def test_text_that_depends_on_the_token_before() -> None:
    """The space before a word belongs to the word's token, although the word alone decodes without it."""
    detokenizer = Detokenizer(word_decode)
    assert [detokenizer.push([token]) for token in (1, 2, 3, 0)] == ["one", " two", " three", " zero"]
    assert detokenizer.text == "one two three zero"


def test_character_split_over_tokens() -> None:
    """The four bytes of one character come as four tokens: it comes out whole with the last."""
    assert run([b"\xf0", b"\x9f", b"\x99", b"\x82", "!"]) == (["", "", "", "🙂", "!"], None)


def test_token_ends_inside_a_character() -> None:
    """A token of a letter and half a character is held back whole."""
    assert run([b"x\xe6", b"\x97", b"\xa5y"]) == (["", "", "x日y"], None)


def test_character_that_is_never_completed() -> None:
    """A stray byte shows as a replacement character once something follows it, or at the end."""
    assert run([b"\xe6", "a", b"\xe6"]) == (["", "\ufffda", "\ufffd"], None)


def test_endless_bytes_that_make_no_character() -> None:
    """A client can force this with a logit bias. It must not cost more for each token than for the one before, and what
    comes after is as whole as ever."""
    num_decoded = 0
    vocabulary = [b"\xa5", "日".encode()[:1], "日".encode()[1:2], "日".encode()[2:]]

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return byte_decode(vocabulary)(token_ids)

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push([token]) for token in [0] * 5000 + [1, 2, 3])
    assert num_decoded < 5003 * 60
    assert text == "\ufffd" * 5000 + "日"


@pytest.mark.parametrize("num_stray", range(30))
def test_character_after_stray_bytes(num_stray: int) -> None:
    """Wherever the waiting ends, it is not within a character."""
    tokens = [b"\xa5"] * num_stray + [b"\xf0", b"\x9f", b"\x99", b"\x82"] * 2 + [b"\xa5"] * 20 + [b"a"]
    pieces, _ = run(tokens)
    assert "".join(pieces) == b"".join(tokens).decode(errors="replace")


def test_tokens_without_text() -> None:
    """Special tokens decode to nothing and delay nothing."""
    assert run(["a", b"", "b", b""]) == (["a", "", "b", ""], None)


def test_several_tokens_at_once() -> None:
    """Speculative decoding or a slow reader brings many tokens in one push."""
    detokenizer = Detokenizer(byte_decode([b"a\xc3", b"\xa9", b"b"]))
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
    assert run([b"a\xe3", b"\x80", b"\x82", "b"], stop=["。"]) == (["", "", "a", ""], "。")


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
    detokenizer = Detokenizer(byte_decode([b"a.", b"b"]), stop=["."])
    assert [detokenizer.push([0]), detokenizer.push([1]), detokenizer.push([], is_last=True)] == ["a", "", ""]
    assert detokenizer.text == "a"


def test_real_byte_level_tokenizer(tmp_path: Path) -> None:
    """Through `Tokenizer`: every byte of this text is a token of its own."""
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = "aé 日本語 🙂 – e\u0301!"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text.encode())
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    assert [piece for piece in pieces if piece] == list(text)


def expected_text(
    decode: Decode, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int
) -> tuple[str, str | None, list[str]]:
    """The specification, with everything decoded from the start each time.

    Returns the text, the stop string that ended it, and the whole characters known after each token.
    """
    known, ignored, history = "", 0, []
    for num_tokens in range(1, len(token_ids) + 2):
        is_flush = num_tokens > len(token_ids)
        text = decode(token_ids[:num_tokens])
        if is_flush or not text.endswith("\ufffd"):
            known = text
        if min(num_tokens, len(token_ids)) <= min_tokens:
            ignored = len(known)
        elif found := [(at, s) for s in stop if (at := known.find(s, ignored)) >= 0]:
            at, stopped_by = min(found)
            return known[:at], stopped_by, history
        if not is_flush:
            history.append(known)
    return known, None, history


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
    decode = byte_decode(tokens)
    token_ids = list(range(len(tokens)))
    text, stopped_by, known = expected_text(decode, token_ids, stop, min_tokens)
    detokenizer = Detokenizer(decode, stop=stop, min_tokens=min_tokens)
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
    assert detokenizer.text == text
