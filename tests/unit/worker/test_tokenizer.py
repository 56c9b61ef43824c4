"""The model's tokenizer and chat template, and what happens where they are missing or refuse."""

from pathlib import Path

import pytest
from tiny_model import write_byte_tokenizer

from pagoda.worker.errors import InvalidRequestError, ModelError
from pagoda.worker.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


def test_text_comes_back(folder: Path) -> None:
    """Spaces before punctuation stay, as the model wrote them."""
    tokenizer = Tokenizer(folder)
    text = " a , b .  c 日本 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_do_not_show(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2, 0]) == "a"


def test_chat_ends_where_the_answer_begins(folder: Path) -> None:
    """The template's special tokens become single tokens, and nothing is put around the whole once more."""
    tokenizer = Tokenizer(folder)
    messages = [{"role": "user", "content": "Hi"}]
    start, end, encode = [1], [2], tokenizer.encode
    assert tokenizer.encode_chat(messages) == [
        *start, *encode("user\nHi"), *end, *encode("\n"), *start, *encode("assistant\n")
    ]  # fmt: skip


def test_template_that_refuses_the_messages(folder: Path) -> None:
    """Templates raise when roles come in an order that the model was not trained on."""
    messages = [{"role": role, "content": "Hi"} for role in ("user", "system")]
    with pytest.raises(InvalidRequestError, match=r"messages: .*refuses them: system comes first"):
        Tokenizer(folder).encode_chat(messages)


def test_no_chat_template(tmp_path: Path) -> None:
    """A base model: chat is refused, plain prompts work."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match=r"messages: .*no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.encode("Hi")


@pytest.mark.parametrize("content", [None, "", "{", "{}"])
def test_folder_without_a_usable_tokenizer(tmp_path: Path, content: str | None) -> None:
    """`tokenizer.json` is missing, empty, cut off or of another kind: the error names the folder."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer(tmp_path)
