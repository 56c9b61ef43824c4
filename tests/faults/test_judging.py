"""What the chaos runner counts as broken, on cases of which that is known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos_plan import Fault, FaultKind
from fake_load import Case, Cases, Oracle, SampleAnswer, difference
from leaks import Leaks
from mixed_chaos import judge
from processes import Usage
from real_chaos import STREAMS, RealOutcome
from samples import Samples
from served import Held

from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import FinishReason, SamplingParams

NOTHING_HELD = Held(3, 0, 0, 0)
RECORD = RequestRecord(0, 0, 10.0, 10.0, 11.0, 12.0, gaps_s=(0.1,), prompt_digest="p", text_digest="t")


def judged(*records: RequestRecord) -> tuple[int, dict[str, int]]:
    """An ingress is killed at 20 s."""
    failed, excused = judge(records, [(20.0, Fault(20.0, FaultKind.KILL_INGRESS, 0.0, 0.0))])
    return len(failed), dict(excused)


@pytest.mark.parametrize(
    ("sent_s", "end_s", "error", "num_failed"),
    [
        (10.0, 12.0, None, 0),
        (10.0, 12.0, "reset", 1),
        (10.0, 21.0, "reset", 0),
        (30.0, 31.0, "http_503", 0),
        (40.0, 41.0, "http_503", 1),
        (10.0, 100.0, "timeout", 1),
        (20.5, 21.0, "http_500", 1),
    ],
    ids=["answered", "before", "during", "soon after", "late", "silence", "a 500"],
)
def test_errors_are_excused_by_the_death_of_an_ingress_only(
    sent_s: float, end_s: float, error: str | None, num_failed: int
) -> None:
    record = replace(RECORD, sent_s=sent_s, end_s=end_s, error=error)
    assert judged(record) == (num_failed, {} if num_failed or error is None else {error: 1})


def test_what_the_proxy_says_of_itself_is_excused() -> None:
    """Not 500 or 404 as such: those of ours are ours."""
    record = replace(RECORD, sent_s=20.5, end_s=21.0)
    assert judged(replace(record, error="http_500", detail="Internal Server Error")) == (0, {"http_500": 1})
    plain = "Path '/v1/completions' not found. Ping http://.../-/routes for available routes."
    assert judged(replace(record, error="http_404", detail=plain)) == (0, {"http_404": 1})
    assert judged(replace(record, error="http_500", detail="internal error"))[0] == 1
    late = replace(record, sent_s=40.0, end_s=41.0)
    assert judged(replace(late, error="http_404", detail=plain))[0] == 1


def outcome(disturbed: RequestRecord, quiet: RequestRecord | None, **changes: Any) -> RealOutcome:
    empty: dict[str, dict[tuple[int, int], RequestRecord]] = {stream.name: {} for stream in STREAMS}
    name = STREAMS[0].name
    return RealOutcome(
        **{
            "disturbed": empty | {name: {(0, 0): disturbed}},
            "quiet": empty | {name: {} if quiet is None else {(0, 0): quiet}},
            "num_kills": 1,
            "replace_s": [1.0],
            "held": NOTHING_HELD,
        }
        | changes
    )


def test_real_answers_are_compared_with_those_of_the_quiet_run() -> None:
    assert outcome(RECORD, RECORD).is_kept
    assert len(outcome(RECORD, replace(RECORD, text_digest="u")).wrong()) == 1
    assert len(outcome(RECORD, replace(RECORD, prompt_digest="q")).wrong()) == 1  # an earlier answer was another one
    assert len(outcome(replace(RECORD, error="cut"), RECORD).failed()) == 1
    assert outcome(RECORD, None).uncompared() == 1
    assert not outcome(RECORD, RECORD, held=Held(3, 1, 0, 0)).is_kept


def test_growth_is_from_the_middle_to_the_end() -> None:
    def ratio(values: list[int]) -> float:
        samples = Samples(usage=[{"all": Usage(rss_bytes=value)} for value in values])
        return samples.growth_ratio(lambda usage: usage.rss_bytes)

    assert ratio([1, 5, 9, 10, 10, 10, 10, 10]) == 1.0  # what it takes to begin with does not count
    assert ratio([10, 10, 10, 10, 12, 14, 16, 18]) == pytest.approx(1.8)


def test_whatever_is_left_is_a_leak() -> None:
    assert Leaks().is_clean
    assert not Leaks(leaked_reservations=1).is_clean


def test_requests_of_a_seed_are_the_same_and_of_all_kinds() -> None:
    cases = [Cases(1, 49152).case(number) for number in range(400)]
    assert cases[7] == Cases(1, 49152).case(7)
    assert cases[7] != Cases(2, 49152).case(7)
    kinds: list[set[Any]] = [
        {case.sampling.temperature for case in cases},
        {case.sampling.n > 1 for case in cases},
        {case.sampling.logprobs is None for case in cases},
        {case.sampling.prompt_logprobs is None for case in cases},
        {bool(case.sampling.stop) for case in cases},
        {case.leaves_after is None for case in cases},
        {case.gives_up_s is None for case in cases},
        {case.pauses_s > 0 for case in cases},
        {case.is_bad for case in cases},
    ]
    assert all(len(kind) == 2 for kind in kinds)


def test_every_difference_of_an_answer_is_seen(fake_model: Path) -> None:
    case = Case(0, (300, 301), SamplingParams(temperature=0, max_tokens=5, logprobs=1, prompt_logprobs=1))
    (answer,) = Oracle(Tokenizer(fake_model), 49152).answers(case)
    assert answer.finish_reason is FinishReason.LENGTH
    assert (len(answer.token_ids), len(answer.logprobs), len(answer.prompt_logprobs)) == (5, 5, 1)
    for name in SampleAnswer.__slots__:
        assert name in difference(case, [replace(answer, **{name: "else"})], [answer])
