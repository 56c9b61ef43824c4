"""The bodies of answers, as a client reads them and as the `openai` package understands them."""

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pagoda.cluster.ingress.answers import AnswerBuilder, error_body
from pagoda.cluster.ingress.schemas import usage

USAGE = usage(num_prompt_tokens=5, num_output_tokens=3, num_cached_tokens=4)


def without_head(body: dict[str, Any]) -> dict[str, Any]:
    """What differs from answer to answer is checked here, and left out."""
    rest = dict(body)
    assert isinstance(rest.pop("created"), int)
    assert rest.pop("id").startswith(("chatcmpl-", "cmpl-"))
    assert rest.pop("model") == "m"
    return rest


def test_whole_chat_answer() -> None:
    builder = AnswerBuilder("chat", "m", 2)
    builder.choices[0].text += ["Hel", "lo"]
    builder.choices[0].finish_reason = "stop"
    builder.choices[1].finish_reason = "length"
    body = builder.whole(USAGE)
    assert without_head(body) == {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            },
        ],
        "usage": USAGE.model_dump(),
    }
    ChatCompletion.model_validate(body)


def test_whole_completion() -> None:
    builder = AnswerBuilder("completions", "m", 1)
    builder.choices[0].text += ["Hel", "lo"]
    builder.choices[0].finish_reason = "stop"
    body = builder.whole(USAGE)
    assert without_head(body) == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE.model_dump(),
    }
    Completion.model_validate(body)


def test_chat_chunks() -> None:
    """The first chunk of each choice, and only that, says the role; the last one says why it ended."""
    builder = AnswerBuilder("chat", "m", 2)
    first, other, middle = builder.chunk(0, "Hel"), builder.chunk(1, "Bye"), builder.chunk(0, "lo")
    builder.choices[0].finish_reason = "stop"
    last = builder.chunk(0, "")
    assert without_head(first) == {
        "object": "chat.completion.chunk",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert other["choices"][0]["delta"] == {"role": "assistant", "content": "Bye"}
    assert [chunk["choices"][0]["delta"] for chunk in (middle, last)] == [{"content": "lo"}, {"content": ""}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in (middle, last)] == [None, "stop"]
    for chunk in (first, other, middle, last):
        ChatCompletionChunk.model_validate(chunk)


def test_completion_chunks() -> None:
    builder = AnswerBuilder("completions", "m", 1)
    assert without_head(builder.chunk(0, "Hel")) == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}],
    }


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_usage_chunk_has_no_choices(endpoint: Any) -> None:
    """As OpenAI's: an empty list of choices, then clients know it from a piece of text."""
    body = without_head(AnswerBuilder(endpoint, "m", 1).usage_chunk(USAGE))
    assert body["choices"] == []
    assert body["usage"] == USAGE.model_dump()


def test_all_chunks_of_an_answer_share_its_head() -> None:
    """Clients group chunks by id; two answers never share one."""
    one, other = AnswerBuilder("chat", "m", 1), AnswerBuilder("chat", "m", 1)
    heads = [
        (chunk["id"], chunk["created"], chunk["model"])
        for chunk in (one.chunk(0, "a"), one.chunk(0, "b"), one.usage_chunk(USAGE), one.whole(USAGE))
    ]
    assert len(set(heads)) == 1
    assert one.chunk(0, "c")["id"] != other.chunk(0, "c")["id"]


def test_error_body() -> None:
    assert error_body("no", kind="server_error") == {
        "error": {"message": "no", "type": "server_error", "param": None, "code": None}
    }
