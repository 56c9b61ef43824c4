"""Whatever was encoded before, a text gets exactly the tokens that it gets when it is encoded alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagoda.worker.model_store import DEFAULT_MODEL, DEFAULT_STORE
from pagoda.worker.text_encoder import TextEncoder
from pagoda.worker.token_cache import TokenCache

SPECIAL = ["<|im_start|>", "<|im_end|>", "<unk>"]
CORPUS = [
    "The quick brown fox doesn't jump over 1234567 lazy dogs; they're   asleep.\n\n  indented\tcode(x) = x**2;\n",
    "日本語の文章です。東京は日本の首都です。 Größe, naïve café, e\u0301te\u0301. 🙂🙃👩‍👩‍👧 مرحبا بالعالم\n",
    "aaaaaaaaaaaaaaaa abababababababab ba ba bababa 00000000 12 123 1234 12345   \r\n \n",
] * 20
# Digits in groups of three, newlines together with the spaces before them: what looks furthest ahead in today's models.
TODAYS_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    """As GPT-2's; offsets that leave out spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL))


def split_byte_level() -> Tokenizer:
    """As Llama 3's and Qwen's: a pattern of its own, NFC before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TODAYS_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL))


def whole_text_bpe() -> Tokenizer:
    """As Llama 2's: a space is put before the text, and merges may cross anything."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))


def unigram(prepend_scheme: str, *, split: bool) -> Tokenizer:
    """As sentencepiece's Unigram models, whose best cut of a word may depend on all of it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=split)
    return trained(tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>"))


def word_piece() -> Tokenizer:
    """As BERT's: spaces and accents go, and a mask token takes the spaces around it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = trained(tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("fox", single_word=True)])
    return tokenizer


def smollm2() -> Tokenizer:
    path = DEFAULT_STORE / DEFAULT_MODEL / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"{DEFAULT_MODEL} is not fetched")
    return Tokenizer.from_file(str(path))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": smollm2,
    "byte_level": byte_level,
    "byte_level_prefix_space": lambda: byte_level(add_prefix_space=True),
    "split_byte_level": split_byte_level,
    "whole_text_bpe": whole_text_bpe,
    "unigram_always": lambda: unigram("always", split=True),
    "unigram_first": lambda: unigram("first", split=True),
    "unigram_whole_text": lambda: unigram("never", split=False),
    "word_piece": word_piece,
}


@cache
def tokenizer_of(name: str) -> tuple[Tokenizer, TextEncoder]:
    tokenizer = TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, TextEncoder(tokenizer)


FRAGMENTS = [
    *(" ", "\n", "\t", "\r\n", "  \n", "a", "ab", "ba", "1", "12", "123", "'s", "'", "don't", " The quick", "fox", "é"),
    *(
        "e\u0301",
        "\u0301",
        "\u0323",
        "ﬁ",
        "日本",
        "。",
        "🙂",
        "👩‍👩‍👧",
        "مرحبا",
        "가",
        "\u1100",
        "\u1161",
        "▁",
        "<|im_",
        "|>",
        "<",
    ),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<unk>",
        "<mask>",
        "<|im_end|>\n<|im_start|>assistant\n",
        ".",
        "\u00a0",
        "\u200b",
        "Ω",
    ),
]
fragments = st.lists(
    st.tuples(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), st.sampled_from([1, 1, 1, 2, 3, 7, 50, 200])),
    max_size=12,
).map(lambda parts: "".join(text * times for text, times in parts))
paragraphs = st.lists(st.sampled_from(CORPUS[:3]), min_size=3, max_size=12).map("".join)
texts = st.one_of(paragraphs, st.tuples(paragraphs, fragments, paragraphs).map("".join), fragments)
changes = st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.one_of(fragments, texts)), min_size=1, max_size=4)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100)
@given(text=texts, changes=changes)
def test_same_tokens_as_alone(name: str, text: str, changes: list[tuple[int, float, str]]) -> None:
    """Each text is an earlier one, cut somewhere and continued otherwise; some are forgotten meanwhile."""
    tokenizer, encoder = tokenizer_of(name)
    cache = TokenCache(encoder.encode, lookahead=encoder.lookahead, max_chars=8000)
    history = [text]
    for which, where, more in [(0, 1.0, ""), *changes]:
        earlier = history[min(which, len(history) - 1)]
        history.append(earlier[: round(where * len(earlier))] + more)
        assert cache.encode(history[-1]) == tokenizer.encode(history[-1], add_special_tokens=False).ids
        cache.check_integrity()
