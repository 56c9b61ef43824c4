"""Each token's bytes; joined, they are the text."""

import pytest
from tiny_model import SPECIAL_TOKENS, write_byte_tokenizer
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.vocabulary import Vocabulary

TEXT = " a\n\t\x00\x7f é 日本 🙂 ¡\xad"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer(folder)


def test_bytes_joined_are_the_text(tokenizer: Tokenizer) -> None:
    """One token a byte, whatever the byte."""
    pieces = [tokenizer.vocabulary.bytes_of(token) for token in tokenizer.encode(TEXT)]
    assert all(len(piece) == 1 for piece in pieces)
    assert b"".join(pieces) == TEXT.encode()


def test_part_of_a_character_has_no_text_of_its_own(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.vocabulary.text_of(token) for token in tokenizer.encode("aé")]
    assert texts == ["a", "\ufffd", "\ufffd"]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    assert [vocabulary.text_of(token) for token in range(3)] == list(SPECIAL_TOKENS)
    assert [vocabulary.is_special(token) for token in range(4)] == [True, True, True, False]


def test_unknown_id_is_empty(tokenizer: Tokenizer) -> None:
    """Models may have more logits than their tokenizer has tokens."""
    assert tokenizer.vocabulary.bytes_of(10**6) == b""


def test_sentencepiece_spelling() -> None:
    """Llama 2's: a block for a space, single bytes by their number."""
    raw = RawTokenizer(BPE(vocab={"\u2581the": 0, "<0xE6>": 1, "n": 2, "<0xEG>": 3}, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=raw))
    assert [vocabulary.bytes_of(token) for token in range(4)] == [b" the", b"\xe6", b"n", b"<0xEG>"]
