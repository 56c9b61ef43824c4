"""The model's tokenizer and chat template, and what happens where they are missing or refuse."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_byte_tokenizer
from transformers import PreTrainedTokenizerFast

from pagoda.worker.chat_options import RESERVED_KWARGS, ChatOptions
from pagoda.worker.errors import InvalidRequestError, ModelError
from pagoda.worker.tokenizer import MAX_UNBOUNDED_CHARS, Tokenizer


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


BROKEN = [
    ("tokenizer.json", ""),
    ("tokenizer.json", "{"),
    ("tokenizer.json", "[]"),
    ("tokenizer.json", '{"model": null}'),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", '{"tokenizer_class": 5}'),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_files_that_are_no_tokenizer(tmp_path: Path, name: str, text: str) -> None:
    """Scenario: an interrupted copy. The library fails in many ways, with several lines; one line names the folder."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: its tokenizer cannot be loaded: ")
    assert len(str(caught.value).splitlines()) == 1


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


def text_of(folder: Path, messages: list[dict[str, str]], options: ChatOptions) -> str:
    tokenizer = Tokenizer(folder)
    return tokenizer.decode(tokenizer.encode_chat(messages, options), skip_special_tokens=False)


def test_conversation_without_the_beginning_of_an_answer(folder: Path) -> None:
    text = text_of(folder, [{"role": "user", "content": "Hi"}], ChatOptions(add_generation_prompt=False))
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", "Hi", ""])
def test_last_message_is_continued(folder: Path, content: str) -> None:
    """The prompt ends inside the message, also where its text came up before, ends in a space or is empty."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    text = text_of(folder, messages, ChatOptions(add_generation_prompt=False, continue_final_message=True))
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_template_variables(tmp_path: Path) -> None:
    """They reach the template; those that it does not know do nothing, those it cannot work with are refused."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ style + '' }}{{ messages[0].content }}{{ 1 // style | int(1) }}")
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    ids = tokenizer.encode_chat(messages, ChatOptions(template_kwargs={"style": "loud", "other": [1]}))
    assert tokenizer.decode(ids) == "loudHi1"
    for value in ("0", [1]):
        with pytest.raises(InvalidRequestError, match=r"messages: .*refuses them"):
            tokenizer.encode_chat(messages, ChatOptions(template_kwargs={"style": value}))


def test_whatever_the_renderer_takes_is_reserved() -> None:
    """A setting of the renderer that a client could give would be taken for one, or fail in Python's own words.

    `self` did: `apply_chat_template() got multiple values for argument 'self'`.
    """
    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    assert named <= RESERVED_KWARGS


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_template_variable_that_would_be_a_setting(name: str) -> None:
    """A client's template or sizes must not reach the renderer through the variables."""
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs: must not contain '{name}'"):
        ChatOptions(template_kwargs={name: 1}).validate()


def test_special_tokens_show_if_asked(folder: Path) -> None:
    assert Tokenizer(folder).decode([1, *Tokenizer(folder).encode("a"), 2], skip_special_tokens=False) == (
        "<|im_start|>a<|im_end|>"
    )


# -- length ------------------------------------------------------------------------------------


class Counting:
    """An encoder that counts the characters it is given."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self.num_chars = 0

    def encode(self, text: str) -> Any:
        self.num_chars += len(text)
        return self._encoder.encode(text)

    def ids(self, text: str) -> Any:
        self.num_chars += len(text)
        return self._encoder.ids(text)


def test_text_that_is_far_too_long_is_not_tokenised(folder: Path) -> None:
    """Of a million characters a few show that they cannot fit; who comes next need not wait for the rest."""
    tokenizer = Tokenizer(folder)
    counting = tokenizer._encoder = Counting(tokenizer._encoder)  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match="more tokens than the 100") as error:
        tokenizer.encode("a" * 1_000_000, max_tokens=100)
    assert error.value.field == "prompt"
    assert counting.num_chars < 1_000
    with pytest.raises(InvalidRequestError) as error:
        tokenizer.encode_chat([{"role": "user", "content": "a" * 10_000}], max_tokens=100)
    assert error.value.field == "messages"


def test_long_text_of_few_tokens_is_tokenised(tmp_path: Path) -> None:
    """That a text has many characters does not mean that it has many tokens."""
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = "a" * 900
    assert len(tokenizer.encode(text, max_tokens=900)) == 900
    assert len(tokenizer.encode(text, max_tokens=890)) == 900, "whether it fits is judged by who has all tokens"


def test_prompts_and_other_texts_have_the_same_tokens(folder: Path) -> None:
    """Encoded one way or the other, and from several threads at once: prompts on one, all else on any."""
    tokenizer = Tokenizer(folder)
    texts = [f"{number} <s>日本 🙂 a  b\n" * (number + 1) for number in range(40)]
    with ThreadPoolExecutor(1) as prompts, ThreadPoolExecutor(3) as others:
        remembered = prompts.map(lambda text: tokenizer.encode(text, max_tokens=10_000), texts)
        forgotten = others.map(tokenizer.encode, texts)
        assert list(remembered) == list(forgotten)


def test_text_that_need_not_fit_is_bounded(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    with pytest.raises(InvalidRequestError, match=str(MAX_UNBOUNDED_CHARS)):
        tokenizer.encode("a" * (MAX_UNBOUNDED_CHARS + 1))
