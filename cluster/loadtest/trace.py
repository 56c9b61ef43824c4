"""Recorded traffic in Mooncake's format: JSON lines of timestamp (ms), input_length, output_length and hash_ids.

Source: Mooncake's FAST'25 traces. A hash id stands for a block of 512 tokens and its whole prefix; equal ids become
equal tokens, so that prefixes are shared as they were. Times, block size and lengths scale down to a small model.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda.cluster.loadtest.workloads import Session, TokenIds, Turn, random_ids
from pagoda.worker.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
MAX_TOKENS = 1_000_000
"""Of one request."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    time_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file holds; lines that are none are counted, not replayed."""

    rows: tuple[TraceRow, ...]
    bad_lines: Mapping[str, int] = field(default_factory=dict)
    """How many, by the field that is wrong; `json` for what is no object."""
    first_problem: str = ""


class _BadLineError(ValueError):
    """A line that is no request. `kind` is its wrong field."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def read_trace(path: Path, *, max_rows: int | None = None) -> Trace:
    """Read a file. Raises `ConfigError` if it cannot be read or has no row at all."""
    rows: list[TraceRow] = []
    bad, problem = Counter[str](), ""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if max_rows is not None and len(rows) == max_rows:
                    break
                if not line.strip():
                    continue
                try:
                    rows.append(_row(line))
                except _BadLineError as error:
                    bad[error.kind] += 1
                    problem = problem or f"line {number}: {error}"
    except OSError as error:
        raise ConfigError("trace", f"cannot read {path}: {error.strerror}") from error
    if not rows:
        raise ConfigError("trace", f"{path} holds no request" + (f"; {problem}" if problem else ""))
    return Trace(tuple(sorted(rows, key=lambda row: row.time_s)), dict(bad), problem)


def _row(line: str) -> TraceRow:
    """Raises `_BadLineError`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLineError("json", str(error)) from error
    if not isinstance(row, dict):
        raise _BadLineError("json", "must be an object")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(_is_count(value) for value in ids):
        raise _BadLineError("hash_ids", "must be a list of integers of at least 0")
    time_ms = row.get("timestamp")
    if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms < 1e15:
        raise _BadLineError("timestamp", "must be milliseconds, at least 0")
    return TraceRow(time_ms / 1e3, _count(row, "input_length"), _count(row, "output_length"), tuple(ids))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _count(row: dict[str, Any], name: str) -> int:
    value = row.get(name, 0)
    if not _is_count(value) or not 1 <= value <= MAX_TOKENS:
        raise _BadLineError(name, f"must be an integer between 1 and {MAX_TOKENS}")
    return int(value)


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Replays a trace."""

    trace: Trace
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens that a hash id becomes; input lengths shrink with it."""
    output_scale: float = 1.0
    max_input_tokens: int | None = None
    """Longer inputs are cut at the end."""
    speed: float = 1.0
    """How many times as fast as it was recorded."""
    vocab_size: int = 32_000
    name: str = "trace"

    def sessions(self, seed: int) -> Iterator[Session]:
        first_s = self.trace.rows[0].time_s
        for number, row in enumerate(self.trace.rows):
            turn = Turn(self._prompt(row, seed, number), max(1, round(row.output_tokens * self.output_scale)))
            yield Session(number, (turn,), start_s=(row.time_s - first_s) / self.speed)

    def _prompt(self, row: TraceRow, seed: int, number: int) -> TokenIds:
        """A block of tokens for each id; what is past the ids is the request's own."""
        length = max(1, round(row.input_tokens * self.block_tokens / TRACE_BLOCK_TOKENS))
        if self.max_input_tokens is not None:
            length = min(length, self.max_input_tokens)
        ids: list[int] = []
        for hash_id in row.hash_ids:
            if len(ids) >= length:
                break
            ids += random_ids(self.block_tokens, self.vocab_size, random.Random(f"{seed} block {hash_id}"))
        if len(ids) < length:
            ids += random_ids(length - len(ids), self.vocab_size, random.Random(f"{seed} rest {number}"))
        return tuple(ids[:length])
