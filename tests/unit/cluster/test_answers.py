"""The bodies of answers, as a client reads them and as the `openai` package understands them."""

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pagoda.cluster.ingress.answers import AnswerBuilder, AnswerOptions, Endpoint, Prompt
from pagoda.cluster.ingress.generation import TextOutput
from pagoda.cluster.ingress.usage import usage
from pagoda.worker.types import FinishReason, TokenLogprobs

USAGE = usage(num_prompt_tokens=5, num_output_tokens=3, num_cached_tokens=4)
HEAD = {"id": "cmpl-r1", "model": "m", "system_fingerprint": "fp"}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
MARK = "^"
"""The only special token."""


class AsciiVocabulary:
    """A token is a byte."""

    def is_special(self, token_id: int) -> bool:
        return chr(token_id) == MARK

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id])

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", "replace")


def build(
    endpoint: Endpoint = "completions", *, num_samples: int = 1, prompts: Sequence[Prompt] = (), **options: Any
) -> AnswerBuilder:
    return AnswerBuilder(
        endpoint,
        request_id="r1",
        model_name="m",
        fingerprint="fp",
        prompts=prompts or [Prompt()],
        num_samples=num_samples,
        vocabulary=AsciiVocabulary(),
        options=AnswerOptions(**options),
    )


def logprobs(text: str, num_top: int = 0) -> tuple[TokenLogprobs, ...]:
    """Of each byte: -1, second to "a", before "b", "c" and so on."""
    top = tuple((ord("a") + index, -0.5 - index) for index in range(num_top))
    return tuple(TokenLogprobs(byte, -1.0, 2, top) for byte in text.encode())


def piece(
    text: str,
    reason: FinishReason | None = None,
    *,
    index: int = 0,
    stop_reason: int | str | None = None,
    num_top: int | None = None,
    prompt: str = "",
) -> TextOutput:
    """A piece whose tokens are its bytes, with log probabilities if `num_top` is given."""
    return TextOutput(
        index,
        text,
        tuple(text.encode()),
        reason,
        0,
        stop_reason,
        () if num_top is None else logprobs(text, num_top),
        () if num_top is None else logprobs(prompt, num_top),
    )


def without_head(body: dict[str, Any], kind: str = "cmpl") -> dict[str, Any]:
    """What is the same in all answers is checked here, and left out."""
    rest = dict(body)
    assert isinstance(rest.pop("created"), int)
    assert {name: rest.pop(name) for name in HEAD} == HEAD | {"id": f"{kind}-r1"}
    return rest


# -- text and ends -------------------------------------------------------------------------------


def test_whole_chat_answer() -> None:
    builder = build("chat", num_samples=2)
    for output in (piece("Hel"), piece("", LENGTH, index=1), piece("lo", STOP, stop_reason="!")):
        builder.add(0, output)
    body = builder.whole(USAGE)
    assert without_head(body, "chatcmpl") == {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "!",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            },
        ],
        "usage": USAGE.model_dump(),
    }
    ChatCompletion.model_validate(body)


def test_whole_completion() -> None:
    builder = build()
    builder.add(0, piece("Hel"))
    builder.add(0, piece("lo", STOP, stop_reason=7))
    body = builder.whole(USAGE)
    assert without_head(body) == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": 7}],
        "usage": USAGE.model_dump(),
    }
    Completion.model_validate(body)


def test_chat_chunks() -> None:
    """The first chunk of each choice, and only that, says the role; the last one says why it ended."""
    builder = build("chat", num_samples=2)
    chunks = [
        builder.chunk(builder.add(0, output))
        for output in (piece("Hel"), piece("Bye", index=1), piece("lo"), piece("", STOP))
    ]
    assert without_head(chunks[0], "chatcmpl") == {
        "object": "chat.completion.chunk",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert chunks[1]["choices"][0]["delta"] == {"role": "assistant", "content": "Bye"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[2:]] == [{"content": "lo"}, {"content": ""}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[2:]] == [None, "stop"]
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 0, 0]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


def test_completion_chunks() -> None:
    builder = build()
    assert without_head(builder.chunk(builder.add(0, piece("Hel")))) == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}],
    }


def test_choices_are_numbered_through_all_prompts() -> None:
    builder = build(num_samples=2, prompts=[Prompt(), Prompt(), Prompt()])
    assert [builder.add(position, piece("a", index=index)) for position, index in ((0, 0), (0, 1), (2, 1))] == [0, 1, 5]
    assert [choice["text"] for choice in builder.whole(USAGE)["choices"]] == ["a", "a", "", "", "", "a"]


def test_chunks_with_nothing_new_are_left_out() -> None:
    """Text that is held back makes no chunk, but for a choice's first one and its end."""
    builder = build()
    has_news = []
    for output in (piece(""), piece(""), piece("a"), piece(""), piece("", STOP)):
        has_news.append(builder.has_news(builder.add(0, output)))
        if has_news[-1]:
            builder.chunk(0)
    assert has_news == [True, False, True, False, True]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_usage_chunk_has_no_choices(endpoint: Any) -> None:
    """As OpenAI's: an empty list of choices, then clients know it from a piece of text."""
    body = build(endpoint).usage_chunk(USAGE)
    assert body["choices"] == []
    assert body["usage"] == USAGE.model_dump()


def test_chunk_with_usage() -> None:
    builder = build()
    assert builder.chunk(builder.add(0, piece("a")), USAGE)["usage"] == USAGE.model_dump()


def test_all_chunks_of_an_answer_share_its_head() -> None:
    """Clients group chunks by id."""
    builder = build("chat")
    chunks = [builder.chunk(0), builder.chunk(0), builder.usage_chunk(USAGE), builder.whole(USAGE)]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


# -- log probabilities ---------------------------------------------------------------------------


def test_chat_logprobs() -> None:
    """Alternatives as many as were asked for, though more are known; bytes of a part of a character are its own."""
    builder = build("chat", num_logprobs=1)
    builder.add(0, piece("xé", STOP, num_top=3))
    body = builder.whole(USAGE)
    best = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": [best]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": [best]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xA9], "top_logprobs": [best]},
        ],
        "refusal": None,
    }
    ChatCompletion.model_validate(body)


def test_completion_logprobs() -> None:
    """The token itself is always among the alternatives; offsets count characters of the text."""
    builder = build(num_logprobs=2)
    builder.add(0, piece("xéb", STOP, num_top=2))
    body = builder.whole(USAGE)
    others = {"a": -0.5, "b": -1.5}
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["x", "\ufffd", "\ufffd", "b"],
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": [others | {"x": -1.0}, others | {"\ufffd": -1.0}, others | {"\ufffd": -1.0}, others],
        "text_offset": [0, 1, 1, 2],
    }
    Completion.model_validate(body)


@pytest.mark.parametrize(("skips", "offsets"), [(True, [0, 1, 1]), (False, [0, 1, 2])])
def test_special_tokens_in_offsets(skips: bool, offsets: list[int]) -> None:
    """A special token has a log probability, but no place in a text that leaves it out."""
    builder = build(num_logprobs=0, skip_special_tokens=skips)
    builder.add(0, piece(f"a{MARK}b", STOP, num_top=0))
    shown = builder.whole(USAGE)["choices"][0]["logprobs"]
    assert (shown["tokens"], shown["text_offset"]) == (["a", MARK, "b"], offsets)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_logprobs_in_chunks_are_the_whole_in_pieces(endpoint: Any) -> None:
    """A piece without text still brings its tokens, and each token comes once."""
    held_back = TextOutput(0, "", tuple(b"\xc3"), None, 0, logprobs=logprobs("é", 1)[:1])
    outputs = [
        piece("ab", num_top=1),
        held_back,
        TextOutput(0, "é", tuple(b"\xa9"), STOP, 0, None, logprobs("é", 1)[1:]),
    ]
    streamed, at_once = build(endpoint, num_logprobs=1), build(endpoint, num_logprobs=1)
    joined: dict[str, list[Any]] = {}
    for output in outputs:
        at_once.add(0, output)
        index = streamed.add(0, output)
        assert streamed.has_news(index)
        for name, values in streamed.chunk(index)["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values or [])
    expected = at_once.whole(USAGE)["choices"][0]["logprobs"]
    assert joined == {name: values or [] for name, values in expected.items()}


def test_minus_infinity_is_a_number() -> None:
    """JSON has no infinity."""
    builder = build(num_logprobs=1)
    impossible = TokenLogprobs(97, float("-inf"), 5, ((98, float("-inf")),))
    builder.add(0, TextOutput(0, "a", (97,), STOP, 0, logprobs=(impossible,)))
    shown = builder.whole(USAGE)["choices"][0]["logprobs"]
    assert (shown["token_logprobs"], shown["top_logprobs"]) == ([-9999.0], [{"b": -9999.0, "a": -9999.0}])


# -- the prompt ----------------------------------------------------------------------------------


def prompts(*echoes: str | None) -> list[Prompt]:
    return [Prompt(tuple(b"hey"), echo) for echo in echoes]


def test_echo() -> None:
    """Each sample of each prompt begins with the prompt, once."""
    builder = build(num_samples=2, prompts=prompts("hey", "you"))
    chunks = [builder.chunk(builder.add(0, output)) for output in (piece("a"), piece("b", index=1), piece("c"))]
    builder.add(1, piece("d"))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["heya", "heyb", "c"]
    assert builder.chunk(2)["choices"][0]["text"] == "youd"


def test_echo_in_a_chat() -> None:
    builder = build("chat", prompts=prompts("hey"))
    builder.add(0, piece("a", STOP))
    assert builder.whole(USAGE)["choices"][0]["message"]["content"] == "heya"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_echo_with_logprobs(is_streamed: bool) -> None:
    """The prompt's come before the output's, with every sample; its first token has none."""
    builder = build(num_samples=2, prompts=prompts("hey"), num_logprobs=0)
    tokens: list[list[Any]] = [[], []]
    outputs = [
        piece("", num_top=0, prompt="e"),
        piece("a", num_top=0, prompt="y"),
        piece("b", STOP, index=1, num_top=0),
        piece("c", STOP, num_top=0),
    ]
    for output in outputs:
        index = builder.add(0, output)
        if is_streamed and builder.has_news(index):
            shown = builder.chunk(index)["choices"][0]["logprobs"]
            tokens[index] += zip(shown["tokens"], shown["token_logprobs"], shown["text_offset"], strict=True)
    if not is_streamed:
        for index, choice in enumerate(builder.whole(USAGE)["choices"]):
            shown = choice["logprobs"]
            tokens[index] += zip(shown["tokens"], shown["token_logprobs"], shown["text_offset"], strict=True)
    prompt = [("h", None, 0), ("e", -1.0, 1), ("y", -1.0, 2)]
    assert tokens == [[*prompt, ("a", -1.0, 3), ("c", -1.0, 4)], [*prompt, ("b", -1.0, 3)]]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompt_logprobs(endpoint: Any) -> None:
    """By token id, the token itself with its own rank; null for the first token, which nothing comes before."""
    builder = build(endpoint, prompts=prompts(None), num_prompt_logprobs=1)
    builder.add(0, piece("x", STOP, num_top=2, prompt="ea"))
    body = builder.whole(USAGE)
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    expected = [
        None,
        {"97": best, "101": {"logprob": -1.0, "rank": 2, "decoded_token": "e"}},
        {"97": {"logprob": -1.0, "rank": 2, "decoded_token": "a"}},
    ]
    assert (body if endpoint == "chat" else body["choices"][0])["prompt_logprobs"] == expected
    assert body["choices"][0]["logprobs"] is None


def test_prompt_of_one_token_has_no_logprobs() -> None:
    builder = build(prompts=[Prompt((104,))], num_prompt_logprobs=1)
    builder.add(0, piece("x", STOP))
    assert builder.whole(USAGE)["choices"][0]["prompt_logprobs"] == [None]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_token_ids(endpoint: Any) -> None:
    """Those of the prompt come with the first chunk, those of the output with each."""
    whole, streamed = (build(endpoint, prompts=prompts(None), token_ids=True) for _ in range(2))
    chunks = []
    for output in (piece("ab"), piece("c", STOP)):
        whole.add(0, output)
        chunks.append(streamed.chunk(streamed.add(0, output)))
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[97, 98], [99]]
    body = whole.whole(USAGE)
    assert body["choices"][0]["token_ids"] == [97, 98, 99]
    for place in (chunks[0], body):
        assert (place if endpoint == "chat" else place["choices"][0])["prompt_token_ids"] == list(b"hey")
    assert "prompt_token_ids" not in str(chunks[1])
