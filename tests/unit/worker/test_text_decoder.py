"""Tokens become text one by one: characters come out whole, and all pieces joined are the text."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import SPECIAL_TOKENS, write_byte_tokenizer
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pagoda.worker.text_decoder import ByteDecoder, TextDecoder, WindowDecoder
from pagoda.worker.tokenizer import Tokenizer

Make = Callable[[Sequence[bytes]], TextDecoder]


def byte_decoder(vocabulary: Sequence[bytes]) -> TextDecoder:
    return ByteDecoder(vocabulary.__getitem__)


def window_decoder(vocabulary: Sequence[bytes]) -> TextDecoder:
    return WindowDecoder(lambda ids: b"".join(vocabulary[token_id] for token_id in ids).decode(errors="replace"))


def pieces_of(make: Make, tokens: Sequence[bytes]) -> list[str]:
    """What comes with each token, and what is left at the end."""
    decoder = make(tokens)
    return [*(decoder.push(index) for index in range(len(tokens))), decoder.flush()]


both = pytest.mark.parametrize("make", [byte_decoder, window_decoder])


@both
def test_character_split_over_tokens(make: Make) -> None:
    """The four bytes of one character come as four tokens: it comes out whole with the last."""
    assert pieces_of(make, [b"\xf0", b"\x9f", b"\x99", b"\x82", b"!"]) == ["", "", "", "🙂", "!", ""]


@both
def test_token_ends_inside_a_character(make: Make) -> None:
    """Of a letter and half a character, half the character waits at least."""
    pieces = pieces_of(make, [b"x\xe6", b"\x97", b"\xa5y"])
    assert "".join(pieces) == "x日y"
    assert pieces[1:] in (["", "日y", ""], ["", "x日y", ""])


@both
def test_character_that_is_never_completed(make: Make) -> None:
    """A stray byte shows as a replacement character once something follows it, or at the end."""
    assert pieces_of(make, [b"\xe6", b"a", b"\xe6"]) == ["", "\ufffda", "", "\ufffd"]


@both
def test_tokens_without_text(make: Make) -> None:
    """Special tokens decode to nothing and delay nothing."""
    assert pieces_of(make, [b"a", b"", b"b", b""]) == ["a", "", "b", "", ""]


@both
@pytest.mark.parametrize("num_stray", range(30))
def test_character_after_stray_bytes(make: Make, num_stray: int) -> None:
    """Wherever the waiting ends, it is not within a character."""
    tokens = [b"\xa5"] * num_stray + [b"\xf0", b"\x9f", b"\x99", b"\x82"] * 2 + [b"\xa5"] * 20 + [b"a"]
    assert "".join(pieces_of(make, tokens)) == b"".join(tokens).decode(errors="replace")


@both
@given(tokens=st.lists(st.one_of(st.sampled_from(["é".encode()[:1], "🙂".encode()[:2], b"a"]), st.binary(max_size=3))))
def test_pieces_joined_are_the_text(make: Make, tokens: list[bytes]) -> None:
    assert "".join(pieces_of(make, tokens)) == b"".join(tokens).decode(errors="replace")


def test_text_that_depends_on_the_token_before() -> None:
    """The space before a word belongs to the word's token, although the word alone decodes without it."""
    words = ["zero", "one", "two", "three"]
    decoder = WindowDecoder(lambda token_ids: " ".join(words[token_id] for token_id in token_ids))
    assert [decoder.push(token) for token in (1, 2, 3, 0)] == ["one", " two", " three", " zero"]


def test_endless_bytes_that_make_no_character() -> None:
    """A client can force this with a logit bias. It must not cost more for each token than for the one before, and what
    comes after is as whole as ever."""
    num_decoded = 0
    vocabulary = [b"\xa5", "日".encode()[:1], "日".encode()[1:2], "日".encode()[2:]]

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return b"".join(vocabulary[token_id] for token_id in token_ids).decode(errors="replace")

    decoder = WindowDecoder(decode)
    text = "".join(decoder.push(token) for token in [0] * 5000 + [1, 2, 3])
    assert num_decoded < 5003 * 60
    assert text == "\ufffd" * 5000 + "日"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level one, with tokens that were added to it: a special one without a role, and a plain one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_tokens([AddedToken("<|header|>", special=True), AddedToken("two words", special=False)])
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_says_what_the_tokenizer_says(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    """Of any tokens, special, added and unknown ones included."""
    token_ids = data.draw(st.lists(st.integers(0, 262)))
    decoder = tokenizer.text_decoder(skip_special_tokens=skip)
    assert isinstance(decoder, ByteDecoder)
    text = "".join([*map(decoder.push, token_ids), decoder.flush()])
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_special_tokens_without_a_role(tokenizer: Tokenizer) -> None:
    (header,) = tokenizer.encode("<|header|>")
    assert tokenizer.vocabulary.is_special(header)
    assert tokenizer.text_decoder().push(header) == ""
    assert tokenizer.text_decoder(skip_special_tokens=False).push(header) == "<|header|>"


def test_real_byte_level_tokenizer(tokenizer: Tokenizer) -> None:
    """Every byte of this text is a token of its own; what comes are its characters."""
    text = "aé 日本語 🙂 – e\u0301!"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text.encode())
    decoder = tokenizer.text_decoder()
    assert [piece for piece in map(decoder.push, token_ids) if piece] == list(text)


def test_vocabulary_of_words(tmp_path: Path) -> None:
    """Llama 2's, in which the first word of a text loses its space and single bytes have tokens of their own."""
    vocabulary = {"\u2581the": 0, "<0xE6>": 1, "<0x97>": 2, "<0xA5>": 3, SPECIAL_TOKENS[0]: 4}
    raw = RawTokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    strip = decoders.Strip(" ", left=1)
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL_TOKENS[0]).save_pretrained(tmp_path)
    decoder = Tokenizer(tmp_path).text_decoder()
    assert [decoder.push(token) for token in (0, 0, 1, 2, 3, 0, 4)] == ["the", " the", "", "", "日", " the", ""]
