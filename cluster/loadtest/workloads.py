"""What is asked: sessions of one or more turns, made from a seed. The same seed gives the same bytes on every machine.

A workload yields sessions without end, each drawn from its own number, so that it does not matter in which order or how
many of them are taken. Lengths are in tokens; text counts a token a word, which is near for English.
"""

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pagoda.cluster.loadtest.text import write_text

TokenIds = tuple[int, ...]
FIRST_TOKEN_ID = 300
"""Below lie special tokens and single bytes in common vocabularies."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session says next."""

    prompt: str | TokenIds
    max_tokens: int
    pause_s: float = 0.0
    """Between the end of the answer before and this."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, or with token ids one completion."""

    number: int
    turns: tuple[Turn, ...]
    system: str | None = None
    start_s: float | None = None
    """When it is to begin, where the workload says so: recorded times."""


class Workload(Protocol):
    """Makes sessions."""

    @property
    def name(self) -> str: ...

    def sessions(self, seed: int) -> Iterator[Session]: ...


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Conversations of several turns with one of a few shared system prompts."""

    num_turns: int = 4
    """On average; conversations have between half and one and a half times as many."""
    num_system_prompts: int = 4
    system_tokens: int = 200
    user_tokens: int = 40
    output_tokens: int = 40
    pause_s: float = 1.0
    """On average, exponential."""
    name: str = "chat"

    def sessions(self, seed: int) -> Iterator[Session]:
        systems = [
            write_text(self.system_tokens, random.Random(f"{seed} system {index}"))
            for index in range(self.num_system_prompts)
        ]
        for number, draw in _numbered(seed):
            turns = tuple(
                Turn(
                    write_text(_near(self.user_tokens, draw), draw),
                    _near(self.output_tokens, draw),
                    draw.expovariate(1 / self.pause_s) if turn and self.pause_s else 0.0,
                )
                for turn in range(_near(self.num_turns, draw))
            )
            yield Session(number, turns, draw.choice(systems) if systems else None)


@dataclass(frozen=True, slots=True)
class SharedPrefixWorkload:
    """Single questions; those of a group begin with the same long text."""

    num_groups: int = 8
    prefix_tokens: int = 500
    question_tokens: int = 50
    output_tokens: int = 32
    name: str = "shared-prefix"

    def sessions(self, seed: int) -> Iterator[Session]:
        prefixes = [
            write_text(self.prefix_tokens, random.Random(f"{seed} prefix {index}")) for index in range(self.num_groups)
        ]
        for number, draw in _numbered(seed):
            question = write_text(self.question_tokens, draw)
            yield Session(number, (Turn(f"{draw.choice(prefixes)}\n\n{question}", self.output_tokens),))


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Loops of an agent: every turn adds what a tool returned, without a pause, to a context that grows and grows."""

    num_turns: int = 10
    system_tokens: int = 400
    tool_tokens: int = 120
    output_tokens: int = 24
    name: str = "agents"

    def sessions(self, seed: int) -> Iterator[Session]:
        system = write_text(self.system_tokens, random.Random(f"{seed} system"))
        for number, draw in _numbered(seed):
            turns = tuple(
                Turn(write_text(_near(self.tool_tokens, draw), draw), self.output_tokens) for _ in range(self.num_turns)
            )
            yield Session(number, turns, system)


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Completions of random token ids: nothing is shared."""

    input_tokens: int = 256
    output_tokens: int = 64
    range_ratio: float = 0.0
    """Lengths are drawn from [1 - ratio, 1 + ratio] times these."""
    vocab_size: int = 32_000
    name: str = "random"

    def sessions(self, seed: int) -> Iterator[Session]:
        for number, draw in _numbered(seed):
            spread = 1 + self.range_ratio * (2 * draw.random() - 1), 1 + self.range_ratio * (2 * draw.random() - 1)
            num_in, num_out = (
                max(1, round(length * factor))
                for length, factor in zip((self.input_tokens, self.output_tokens), spread, strict=True)
            )
            yield Session(number, (Turn(random_ids(num_in, self.vocab_size, draw), num_out),))


def random_ids(count: int, vocab_size: int, draw: random.Random) -> TokenIds:
    span = vocab_size - FIRST_TOKEN_ID
    return tuple(FIRST_TOKEN_ID + number % span for (number,) in struct.iter_unpack("<I", draw.randbytes(4 * count)))


def _numbered(seed: int) -> Iterator[tuple[int, random.Random]]:
    """Session numbers, each with a random source of its own."""
    number = 0
    while True:
        yield number, random.Random(f"{seed} session {number}")
        number += 1


def _near(mean: int, draw: random.Random) -> int:
    """Between half and one and a half times the mean."""
    return max(1, round(mean * (0.5 + draw.random())))
