"""Workloads: the same seed, the same bytes; lengths as asked for; prefixes shared as recorded."""

import hashlib
import json
import random
from itertools import islice
from pathlib import Path

import pytest

from pagoda.cluster.loadtest.arrivals import ARRIVAL_KINDS, ArrivalKind, arrivals
from pagoda.cluster.loadtest.trace import TraceWorkload, read_trace
from pagoda.cluster.loadtest.workloads import (
    AgentWorkload,
    ChatWorkload,
    RandomWorkload,
    Session,
    SharedPrefixWorkload,
    Workload,
)
from pagoda.worker.errors import ConfigError

DIGESTS = ["9d30dc031e0249ca", "8031e4d59806b7e4", "eb2e14af4419bb9c", "65122cae805d3c65"]
WORKLOADS = [ChatWorkload(), SharedPrefixWorkload(), AgentWorkload(), RandomWorkload(range_ratio=0.5)]


def digest(sessions: list[Session]) -> str:
    return hashlib.sha256(repr(sessions).encode()).hexdigest()[:16]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_seed_decides(workload: Workload) -> None:
    first, again, other = (list(islice(workload.sessions(seed), 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert [session.number for session in first] == list(range(20))


def test_bytes_are_the_same_on_every_machine() -> None:
    """Scenario: a run is compared with one of last month, made by another Python on another machine."""
    assert [digest(list(islice(workload.sessions(7), 5))) for workload in WORKLOADS] == DIGESTS


def test_chat_shares_system_prompts() -> None:
    sessions = list(islice(ChatWorkload(num_system_prompts=2, num_turns=6, user_tokens=10).sessions(0), 50))
    assert len({session.system for session in sessions}) == 2
    assert {len(session.turns) for session in sessions} <= set(range(3, 10))
    assert all(session.turns[0].pause_s == 0 for session in sessions)
    assert all(5 <= len(str(turn.prompt).split()) <= 15 for session in sessions for turn in session.turns)


def test_chat_without_system_prompts_or_pauses() -> None:
    session = next(ChatWorkload(num_system_prompts=0, pause_s=0).sessions(0))
    assert session.system is None
    assert all(turn.pause_s == 0 for turn in session.turns)


def test_shared_prefixes() -> None:
    workload = SharedPrefixWorkload(num_groups=3, prefix_tokens=30, question_tokens=5)
    prompts = [str(session.turns[0].prompt) for session in islice(workload.sessions(0), 60)]
    prefixes = {prompt.split("\n\n")[0] for prompt in prompts}
    assert len(prefixes) == 3
    assert all(len(prefix.split()) == 30 for prefix in prefixes)
    assert len(set(prompts)) == 60


def test_random_lengths() -> None:
    turns = [s.turns[0] for s in islice(RandomWorkload(100, 10, range_ratio=0.2, vocab_size=400).sessions(0), 200)]
    assert {len(turn.prompt) for turn in turns} <= set(range(80, 121))
    assert {turn.max_tokens for turn in turns} == {8, 9, 10, 11, 12}
    assert {token for turn in turns for token in turn.prompt if isinstance(token, int)} == set(range(300, 400))


@pytest.mark.parametrize("kind", ARRIVAL_KINDS)
def test_arrivals_keep_the_rate(kind: ArrivalKind) -> None:
    times = list(islice(arrivals(kind, 50.0, random.Random(1)), 20_000))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 50, rel=0.05)
    assert times == list(islice(arrivals(kind, 50.0, random.Random(1)), 20_000))


def test_bursts_come_at_once() -> None:
    times = list(islice(arrivals("bursts", 10.0, random.Random(0), burst_size=4), 40))
    assert all(len(set(times[i : i + 4])) == 1 for i in range(0, 40, 4))
    assert len(set(times)) == 10


def write(path: Path, *rows: object) -> Path:
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_text(text, errors="surrogateescape")
    return path


def row(**changes: object) -> dict[str, object]:
    return {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2], **changes}


def test_trace_shares_what_was_shared(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(), row(timestamp=3000, hash_ids=[0, 1, 9]), row(timestamp=2000, hash_ids=[]))
    one, own, other = TraceWorkload(read_trace(path)).sessions(0)
    assert [session.start_s for session in (one, own, other)] == [0.0, 1.0, 2.0]
    first, second, third = (session.turns[0].prompt for session in (one, other, own))
    assert len(first) == len(second) == len(third) == 1100
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]
    assert first[0] != third[0]


def test_trace_scaled_to_a_small_model(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(), row(timestamp=3000, input_length=51_200, hash_ids=[*range(100)]))
    workload = TraceWorkload(read_trace(path), block_tokens=16, output_scale=0.1, speed=4.0, max_input_tokens=200)
    small, cut = workload.sessions(0)
    assert (len(small.turns[0].prompt), small.turns[0].max_tokens) == (34, 2)
    assert (len(cut.turns[0].prompt), cut.start_s) == (200, 0.5)
    assert small.turns[0].prompt[:32] == cut.turns[0].prompt[:32]


BAD_LINES: dict[str, tuple[str, object]] = {
    "half": ("json", "{"),
    "list": ("json", "[]"),
    "deep": ("json", "[" * 100_000),
    "not UTF-8": ("json", "\udcff"),
    "time of text": ("timestamp", row(timestamp="now")),
    "time before": ("timestamp", row(timestamp=-1)),
    "no time": ("timestamp", row(timestamp=float("nan"))),
    "true": ("timestamp", row(timestamp=True)),
    "no input": ("input_length", row(input_length=0)),
    "half a token": ("input_length", row(input_length=1.5)),
    "endless input": ("input_length", row(input_length=10**12)),
    "no output": ("output_length", row(output_length=None)),
    "endless output": ("output_length", row(output_length=10**10)),
    "ids of text": ("hash_ids", row(hash_ids="0")),
    "id below zero": ("hash_ids", row(hash_ids=[0, -1])),
    "nested ids": ("hash_ids", row(hash_ids=[[]])),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_trace_lines_are_counted_by_kind(tmp_path: Path, name: str) -> None:
    kind, bad = BAD_LINES[name]
    trace = read_trace(write(tmp_path / "t.jsonl", row(), bad, row()))
    assert (len(trace.rows), trace.bad_lines) == (2, {kind: 1})
    assert trace.first_problem.startswith(f"line 2: {kind}: ")


def test_trace_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trace: cannot read .*nowhere"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"^trace: .* holds no request; line 1: json: "):
        read_trace(write(tmp_path / "t.jsonl", "timestamp,input_length"))


def test_only_the_first_rows(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t.jsonl", *[row()] * 5), max_rows=2).rows) == 2
