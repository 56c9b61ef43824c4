"""The cache of token prefixes with an encoder made for the purpose: what is encoded again, reused, forgotten."""

from array import array
from pathlib import Path

import pytest
from tiny_model import write_byte_tokenizer

from pagoda.worker.text_encoder import text_encoder_for, tokens_around
from pagoda.worker.token_cache import EncodedText, TokenCache
from pagoda.worker.tokenizer import Tokenizer

WORDS = "once upon a time there was a very small pagoda by the sea "


class WordEncoder:
    """A token for each word, its length and first letter, and a seam before each. Remembers what it was asked."""

    def __init__(self, *, merges: str | None = None) -> None:
        """Two words that begin with the letter `merges` are one token, unless all before them do: that is the rule
        of a tokenizer that looks back."""
        self.asked: list[str] = []
        self._merges = merges

    def encode(self, text: str) -> EncodedText:
        self.asked.append(text)
        result = EncodedText(array("I"), array("I"), array("I"))
        begin, has_others = 0, False
        while begin < len(text) or begin == 0:
            end = text.find(" ", begin) + 1 or len(text)
            if text[begin : begin + 1] == text[end : end + 1] == self._merges and has_others:
                end = text.find(" ", end) + 1 or len(text)
            has_others |= text[begin : begin + 1] != self._merges
            result.seam_tokens.append(len(result.ids))
            result.seam_chars.append(begin)
            result.ids.append(1000 * (end - begin) + ord(text[begin : begin + 1] or " "))
            begin = max(end, 1)
        return result

    def num_asked(self) -> int:
        """Characters since the last call."""
        num, self.asked = sum(map(len, self.asked)), []
        return num


def ids(text: str, encoder: WordEncoder | None = None) -> list[int]:
    return (encoder or WordEncoder()).encode(text).ids.tolist()


def make(encoder: WordEncoder, *, max_chars: int = 100_000) -> TokenCache:
    return TokenCache(encoder.encode, lookahead=16, max_chars=max_chars)


def test_only_the_end_is_encoded_again() -> None:
    """A chat's next turn costs what is new and an overlap, however long the history."""
    encoder = WordEncoder()
    cache = make(encoder)
    history = WORDS * 100
    assert cache.encode(history) == ids(history)
    assert encoder.num_asked() == len(history)
    assert cache.encode(history + "and then") == ids(history + "and then")
    assert encoder.num_asked() < 120
    cache.check_integrity()


def test_same_text_again() -> None:
    encoder = WordEncoder()
    cache = make(encoder)
    assert cache.encode(WORDS * 20) == cache.encode(WORDS * 20)
    assert encoder.asked == [WORDS * 20]


def test_text_that_parts_from_an_earlier_one() -> None:
    """Another answer to the same history: what both have in common is reused, and the first stays known."""
    encoder = WordEncoder()
    cache = make(encoder)
    history = WORDS * 50
    cache.encode(history + "left " * 100)
    cache.encode(history + "right " * 100)
    encoder.num_asked()
    for end in ("left " * 100, "right " * 100):
        cache.encode(history + end + "on")
        assert encoder.num_asked() < 120


def test_text_that_is_the_beginning_of_an_earlier_one() -> None:
    encoder = WordEncoder()
    cache = make(encoder)
    cache.encode(WORDS * 50)
    encoder.num_asked()
    assert cache.encode((WORDS * 50)[:1234]) == ids((WORDS * 50)[:1234])
    assert encoder.num_asked() < 120


def test_overlap_that_does_not_agree_moves_back() -> None:
    """Cut within a run of words that pair up, they do not pair: the cut has to move before the run."""
    encoder = WordEncoder(merges="a")
    cache = make(encoder)
    text = WORDS * 50 + "b " + "a " * 101
    cache.encode(text)
    encoder.num_asked()
    assert cache.encode(text + "a " * 5 + "b") == ids(text + "a " * 5 + "b", WordEncoder(merges="a"))
    first, second = encoder.asked
    assert len(first) < len(second) < 1000


def test_overlap_that_never_agrees() -> None:
    """An encoder that counts from where it begins: the whole text is encoded."""

    class Counting(WordEncoder):
        def encode(self, text: str) -> EncodedText:
            result = super().encode(text)
            return EncodedText(array("I", range(len(result.ids))), result.seam_tokens, result.seam_chars)

    cache = make(Counting())
    cache.encode(WORDS * 200)
    assert cache.encode(WORDS * 200 + "end") == ids(WORDS * 200 + "end", Counting())


def test_seams_at_other_places_do_not_agree() -> None:
    """The same token ids cut elsewhere: reusing them would be luck."""

    class Shifting(WordEncoder):
        def encode(self, text: str) -> EncodedText:
            result = super().encode(text)
            shifted = [seam + (seam > 0) for seam in result.seam_chars]
            is_whole = text.startswith("once upon") and len(text) >= len(WORDS) * 100
            seam_chars = result.seam_chars if is_whole else array("I", shifted)
            return EncodedText(array("I", [7] * len(result.ids)), result.seam_tokens, seam_chars)

    encoder = Shifting()
    cache = make(encoder)
    cache.encode(WORDS * 100)
    encoder.num_asked()
    cache.encode(WORDS * 100 + "end")
    assert encoder.num_asked() >= len(WORDS * 100)


def test_short_texts_are_not_remembered() -> None:
    encoder = WordEncoder()
    cache = make(encoder)
    assert cache.encode(WORDS) == cache.encode(WORDS) == ids(WORDS)
    assert cache.encode("") == ids("")
    assert cache.num_chars == 0


def test_memory_is_bounded() -> None:
    """The chats that nobody goes on with are forgotten first."""
    encoder = WordEncoder()
    cache = make(encoder, max_chars=10_000)
    chats = [f"chat {number} " + WORDS * 40 for number in range(5)]
    for chat in chats:
        cache.encode(chat)
        cache.encode(chats[0])
        assert cache.num_chars <= 10_000
        cache.check_integrity()
    encoder.num_asked()
    cache.encode(chats[0] + "on")
    assert encoder.num_asked() < 120
    cache.encode(chats[1] + "on")
    assert encoder.num_asked() >= len(chats[1])


def test_growing_chat_is_remembered_once() -> None:
    """A turn takes the place of the turn before."""
    cache = make(WordEncoder())
    text = WORDS * 20
    for _ in range(10):
        text += WORDS
        cache.encode(text)
    assert cache.num_chars == len(text)
    cache.check_integrity()


def test_text_longer_than_the_memory() -> None:
    cache = make(WordEncoder(), max_chars=1000)
    assert cache.encode(WORDS * 50) == ids(WORDS * 50)
    assert cache.num_chars == 0


# -- through `Tokenizer` -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


def test_chat_turn_by_turn(folder: Path) -> None:
    """Every turn's prompt is what a tokenizer without memory makes of it."""
    tokenizer, messages = Tokenizer(folder), []
    for turn in range(8):
        messages += [{"role": "user", "content": f"{WORDS}{turn} 日本🙂"}, {"role": "assistant", "content": WORDS * 5}]
        assert tokenizer.encode_chat(messages) == Tokenizer(folder).encode_chat(messages)


def test_plain_prompt_keeps_its_special_tokens(folder: Path) -> None:
    """A model whose tokenizer puts a token before and behind each text."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert tokens_around(tokenizer) == ([1], [2])
    assert text_encoder_for(tokenizer) is not None


def test_tokenizer_without_offsets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One written in Python has no backend that says where tokens are: everything is encoded as it always was."""
    expected = Tokenizer(folder)
    monkeypatch.setattr("pagoda.worker.tokenizer.text_encoder_for", lambda _: None)
    tokenizer = Tokenizer(folder)
    text = WORDS * 50
    assert tokenizer.encode(text) == tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text)) == text


def test_no_encoder_for_what_cannot_be_cut(folder: Path) -> None:
    """No backend; tokens drawn at random; a wrapper that changes the text first."""
    from transformers import AutoTokenizer

    class Wrapped:
        def __init__(self) -> None:
            self.backend_tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return self.backend_tokenizer.encode(text.lower(), add_special_tokens=add_special_tokens).ids

    assert text_encoder_for(object()) is None
    assert text_encoder_for(Wrapped()) is None
    random = AutoTokenizer.from_pretrained(folder)
    random.backend_tokenizer.model.dropout = 0.5
    assert text_encoder_for(random) is None
