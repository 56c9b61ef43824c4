"""Conversations of several turns: each turn finds what the turns before it have computed, however they ended."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from local_server import LocalServer, serve_locally, tiny_engine_config

from pagoda.worker.config import CacheConfig

BLOCK_SIZE = 16
NUM_TURNS = 3
MAX_TOKENS = 40
STOP_LENGTH = 5
FIRST = "What do pagodas and caches have in common? Think of their layers, and answer in a few sentences."
NEXT = "Thank you. What else can you tell me about them?"
MODEL = "m"
MODELS = ["tiny", "smollm2"]
"""One whose answers are noise, and one that speaks; both with the same tokenizer and chat template."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(model: str, request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """In float32, where it makes no difference what is computed anew and what comes from the cache."""
    folder: Path = request.getfixturevalue(model)
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=512)
    config = tiny_engine_config(folder, dtype="float32", max_model_len=2048, cache=cache)
    with serve_locally(config, model_name=MODEL) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int


class Conversation:
    """Asks turn by turn, with the whole history each time, as chat clients do."""

    def __init__(self, client: openai.OpenAI, first: str) -> None:
        self._client = client
        self._messages: list[Any] = [{"role": "user", "content": first}]

    def ask(self, **fields: Any) -> Answer:
        answer = self._client.chat.completions.create(
            model=MODEL, messages=self._messages, max_tokens=MAX_TOKENS, temperature=0, **fields
        )
        usage, (choice,) = answer.usage, answer.choices
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return Answer(
            choice.message.content or "",
            choice.finish_reason,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens or 0,
            usage.completion_tokens,
        )

    def stop_string(self) -> str:
        """A few characters of the answer that would come without a stop string, from its middle: half a word, perhaps.

        Who asks for log probabilities of the prompt leaves nothing in the cache.
        """
        text = self.ask(extra_body={"prompt_logprobs": 0}).text
        return text[len(text) // 2 :][:STOP_LENGTH]

    def go_on(self, answer: str) -> None:
        self._messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": NEXT}]


@pytest.mark.parametrize("is_stopped", [False, True], ids=["to the limit", "by a stop string"])
def test_every_turn_finds_the_ones_before(server: LocalServer, model: str, is_stopped: bool) -> None:
    """From the second turn on: all whole blocks of the prompt before, and of the answer to it.

    Without the tokens of the stop string, which is no part of the answer and may cut through a token. Noise comes back
    as other tokens than those that made it: there only the prompts count.
    """
    conversation = Conversation(server.openai, f"{FIRST} ({is_stopped})")
    num_expected = 0
    for _ in range(NUM_TURNS):
        answer = conversation.ask(**({"stop": conversation.stop_string()} if is_stopped else {}))
        assert answer.num_cached_tokens >= num_expected
        if is_stopped:
            assert answer.finish_reason == "stop"
        num_known = answer.num_prompt_tokens + (answer.num_tokens - STOP_LENGTH - 1 if model == "smollm2" else 0)
        num_expected = num_known // BLOCK_SIZE * BLOCK_SIZE
        conversation.go_on(answer.text)
    assert num_expected > 5 * BLOCK_SIZE
