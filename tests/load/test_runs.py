"""Load tests from end to end, against a server that answers at once."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scripted_server import HANG, Script, answered, delta, head, scripted_server, usage

from pagoda.cluster.cli import main
from pagoda.cluster.loadtest import compare, report
from pagoda.cluster.loadtest.ideal import PrefixCache, ideal_cached_tokens
from pagoda.cluster.loadtest.openai_target import OpenAITarget
from pagoda.cluster.loadtest.records import RequestRecord
from pagoda.cluster.loadtest.runner import LoadOptions, LoadResult, LoadRunner, LoadState
from pagoda.cluster.loadtest.target import LoadRequest
from pagoda.cluster.loadtest.workloads import ChatWorkload, RandomWorkload, Session, Turn

PAGODA = Path(sys.executable).with_name("pagoda")


@dataclass(frozen=True, slots=True)
class Given:
    """These sessions."""

    given: tuple[Session, ...]
    name: str = "given"

    def sessions(self, seed: int) -> Iterator[Session]:  # noqa: ARG002
        yield from self.given


def chat_answer(*pieces: str) -> list[bytes]:
    return [head(), *map(delta, pieces), delta(None, "stop"), usage(prompt=9, output=len(pieces), cached=3)]


async def run(url: str, workload: Any, options: LoadOptions, **changes: Any) -> LoadResult:
    target = OpenAITarget(url, model="m")
    try:
        return await LoadRunner(workload, target, options, **changes).run()
    finally:
        await target.close()


async def test_turns_follow_each_other_with_the_answers_between() -> None:
    turns = (Turn("one", 5), Turn("two", 6, pause_s=0.05), Turn("three", 7))
    async with scripted_server(lambda *_: chat_answer("yes", "!")) as server:
        result = await run(server.url, Given((Session(0, turns, system="be kind"),)), LoadOptions(concurrency=1))
    assert [message["content"] for message in server.bodies[2]["messages"]] == [
        "be kind", "one", "yes!", "two", "yes!", "three",
    ]  # fmt: skip
    assert [body["max_tokens"] for body in server.bodies] == [5, 6, 7]
    first, second, _ = result.records
    assert second.intended_s - first.end_s == pytest.approx(0.05, abs=0.01)
    assert (first.num_prompt_tokens, first.num_cached_tokens, first.num_output_tokens) == (9, 3, 2)
    assert first.text_digest == second.text_digest


async def test_sampling_seeds_are_the_same_in_each_run() -> None:
    """Each request has one of its own; who asks with others has asked something else."""
    turns = (Turn("one", 5), Turn("two", 5))
    sessions = Given((Session(0, turns), Session(1, turns)))

    async def seeds_of(**options: Any) -> tuple[list[int | None], list[str]]:
        async with scripted_server(lambda *_: chat_answer("yes")) as server:
            result = await run(server.url, sessions, LoadOptions(concurrency=1, **options))
        return [body.get("seed") for body in server.bodies], [record.prompt_digest for record in result.records]

    seeds, digests = await seeds_of(sampling_seeds=True)
    assert len(set(seeds)) == 4
    assert (seeds, digests) == await seeds_of(sampling_seeds=True)
    others, other_digests = await seeds_of(sampling_seeds=True, seed=1)
    assert not set(seeds) & set(others)
    assert not set(digests) & set(other_digests)
    assert (await seeds_of())[0] == [None] * 4


async def test_a_session_ends_with_its_first_failure() -> None:
    def script_of(_: str, body: dict[str, Any]) -> Script:
        return [head(500)] if len(body["messages"]) > 1 else chat_answer("a")

    async with scripted_server(script_of) as server:
        turns = tuple(Turn("x", 1) for _ in range(5))
        result = await run(server.url, Given((Session(0, turns), Session(1, turns))), LoadOptions(concurrency=1))
    assert [(record.session, record.turn, record.error) for record in result.records] == [
        (0, 0, None), (0, 1, "http_500"), (1, 0, None), (1, 1, "http_500"),
    ]  # fmt: skip
    assert result.duration_s == result.records[-1].end_s  # and not until the pause behind a failure was over


async def test_closed_loop_never_has_more_at_once() -> None:
    now = most = 0

    class Target:
        async def send(self, _: LoadRequest, answer: Any) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1
            answer.piece_s.append(0.0)
            answer.finish_reason = "stop"

    options = LoadOptions(concurrency=5, max_sessions=40)
    result = await LoadRunner(RandomWorkload(), Target(), options).run()  # type: ignore[arg-type]
    assert (len(result.records), most) == (40, 5)
    assert report.most_at_once(result.records) == 5


async def test_open_loop_does_not_wait_for_answers() -> None:
    """Scenario: a server hangs. Requests must go on being sent when they are due, and the test must end."""
    async with scripted_server(lambda *_: [HANG]) as server:
        target = OpenAITarget(server.url, model="m", timeout_s=0.5)
        options = LoadOptions(rate=100.0, arrivals="constant", duration_s=0.3)
        result = await LoadRunner(RandomWorkload(4, 4), target, options).run()
        await target.close()
    assert len(result.records) == 30
    assert all(record.error == "timeout" for record in result.records)
    assert [record.intended_s for record in result.records] == pytest.approx([i / 100 for i in range(30)])


async def test_nothing_is_sent_that_is_due_after_the_end() -> None:
    turns = (Turn("one", 5), Turn("two", 5, pause_s=9.0))
    async with scripted_server(lambda *_: chat_answer("a")) as server:
        sessions = tuple(Session(i, turns, start_s=at) for i, at in enumerate((0.0, 0.1, 1.0)))
        result = await run(server.url, Given(sessions), LoadOptions(as_recorded=True, duration_s=0.3))
    assert [(record.session, record.turn) for record in result.records] == [(0, 0), (1, 0)]


async def test_more_sessions_than_can_be_sent_stop_nothing_else() -> None:
    """Scenario: sessions are due faster than they can be made. What was sent must go on, and a stop must stop."""
    sent = asyncio.Event()

    class Target:
        async def send(self, _: LoadRequest, answer: Any) -> None:
            sent.set()
            answer.finish_reason = "stop"

    options = LoadOptions(rate=1e6, duration_s=60.0)
    task = asyncio.create_task(LoadRunner(RandomWorkload(4, 4), Target(), options).run())  # type: ignore[arg-type]
    await sent.wait()
    task.cancel()
    assert (await task).was_interrupted


async def test_what_runs_when_it_is_stopped_counts_as_interrupted() -> None:
    states: list[LoadState] = []
    async with scripted_server(lambda *_: [head(), delta("a"), HANG]) as server:
        target = OpenAITarget(server.url, model="m")
        runner = LoadRunner(ChatWorkload(), target, LoadOptions(concurrency=2), on_progress=states.append)
        task = asyncio.create_task(runner.run())
        while not states:
            await asyncio.sleep(0.01)
        task.cancel()
        result = await task
        await target.close()
    assert (states[0].num_running, states[0].num_tokens, states[0].num_sessions) == (2, 2, 2)
    assert result.was_interrupted
    assert [record.error for record in result.records] == ["interrupted", "interrupted"]


def record(**changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "session": 0, "turn": 0, "intended_s": 0.0, "sent_s": 0.0, "first_s": 1.0, "end_s": 3.0,
        "num_prompt_tokens": 100, "num_cached_tokens": 32, "num_output_tokens": 5, "gaps_s": (0.5, 0.5, 0.5, 0.5),
    }  # fmt: skip
    return RequestRecord(**(fields | changes))


def result(*records: RequestRecord, **changes: Any) -> LoadResult:
    return LoadResult(list(records), {}, **({"duration_s": 10.0, "client_cpu_ratio": 0.1} | changes))


def test_figures() -> None:
    records = [record(session=i, intended_s=0.1 * i, sent_s=0.1 * i + 0.02, first_s=0.2 * i + 1) for i in range(11)]
    summary = report.summarize(result(*records, record(error="timeout", first_s=None)), report.Slo(ttft_s=1.45))
    assert summary["ttft_p50_ms"] == pytest.approx(1500)
    assert summary["ttft_p90_ms"] == pytest.approx(1900)
    assert summary["ttft_mean_ms"] == pytest.approx(1500)
    assert summary["tpot_p50_ms"] == pytest.approx((3 - 2) / 4 * 1e3)
    assert summary["itl_p99_ms"] == pytest.approx(500)
    assert summary["e2e_max_ms"] == pytest.approx(3000)
    assert summary["goodput_rps"] == pytest.approx(0.5)
    assert summary["good_ratio"] == pytest.approx(5 / 12)
    assert summary["output_tokens_per_s"] == pytest.approx(5.5)
    assert (summary["hit_ratio"], summary["hit_ratio_over_ideal"]) == (0.32, None)
    assert summary["sent_late_p99_ms"] == pytest.approx(20)
    assert not summary["client_is_bottleneck"]
    assert any("1 failed (timeout 1)" in line for line in report.lines(summary))


def test_what_was_interrupted_is_neither_good_nor_bad() -> None:
    records = [record(), record(), record(error="interrupted", first_s=None)]
    summary = report.summarize(result(*records, was_interrupted=True), report.Slo(ttft_s=1.5))
    assert (summary["good_ratio"], summary["failed_interrupted"]) == (1.0, 1)


@pytest.mark.parametrize("changes", [{"client_cpu_ratio": 0.95}, {"tick_lag_s": [0.0] * 50 + [0.2] * 5}])
def test_a_client_with_too_much_to_do_says_so(changes: dict[str, Any]) -> None:
    summary = report.summarize(result(record(), **changes), report.Slo())
    assert summary["client_is_bottleneck"]
    assert "WARNING" in report.lines(summary)[-1]


def test_a_client_that_sends_late_says_so() -> None:
    """Scenario: bursts of hundreds. On average the client is idle, but nothing leaves when it is due."""
    late = record(intended_s=1.0, sent_s=1.4)
    assert report.summarize(result(record(), late, late), report.Slo())["client_is_bottleneck"]
    assert not report.summarize(result(record(), late), report.Slo())["client_is_bottleneck"], "one may be chance"


def test_a_short_test_says_nothing_of_its_client() -> None:
    summary = report.summarize(result(record(), client_cpu_ratio=1.0, duration_s=0.1), report.Slo())
    assert not summary["client_is_bottleneck"]


def test_slo_of_each_kind() -> None:
    one = record()
    assert report.Slo(1.0, 0.5, 3.0).is_met(one)
    assert not report.Slo(ttft_s=0.9).is_met(one)
    assert not report.Slo(tpot_s=0.4).is_met(one)
    assert not report.Slo(e2e_s=2.9).is_met(one)
    assert not report.Slo().is_met(record(error="reset"))
    assert report.Slo(tpot_s=0.1).is_met(record(num_output_tokens=1))


def test_knee() -> None:
    def stage(rate: float, good_ratio: float | None, *, was_interrupted: bool = False) -> dict[str, Any]:
        return {"rate": rate, "good_ratio": good_ratio, "was_interrupted": was_interrupted}

    stages = [stage(1, 1.0), stage(2, 0.9), stage(4, 0.5), stage(8, 0.95)]
    assert report.knee(stages) == 2
    assert report.knee(stages[2:]) is None
    assert report.knee([stage(1, None)]) is None
    assert report.knee([stage(1, 1.0), stage(2, 1.0, was_interrupted=True)]) == 1


def test_unlimited_cache() -> None:
    cache = PrefixCache(4)
    cache.add(range(10))
    assert cache.num_cached(list(range(12))) == 8
    assert cache.num_cached(list(range(8))) == 4  # the last token is always computed
    assert cache.num_cached([0, 1, 2, 9, 4, 5, 6, 7]) == 0
    assert cache.num_cached(list(range(4, 12))) == 0  # a block counts with what is before it
    assert cache.num_cached([]) == 0


def test_ideal_counts_answers_that_a_conversation_goes_on_from() -> None:
    first, second = list(range(40)), list(range(100))
    records = [record(sent_s=0.0, num_output_tokens=20), record(turn=1, sent_s=5.0), record(session=1, sent_s=0.1)]
    prompts = {(0, 0): first, (0, 1): second, (1, 0): first}
    assert ideal_cached_tokens(records, prompts) == {(0, 0): 0, (1, 0): 32, (0, 1): 48}


def saved(path: Path, *records: RequestRecord) -> Path:
    summary = report.summarize(result(*records), report.Slo())
    compare.save(path, compare.Run(summary, [one.as_json() for one in records]))
    return path


def test_compare(tmp_path: Path) -> None:
    before = saved(tmp_path / "a.json", record(text_digest="x"), record(turn=1, text_digest="y"), record(session=5))
    after = saved(
        tmp_path / "b.json", record(text_digest="x"), record(turn=1, text_digest="z"), record(session=5, error="cut")
    )
    outcome = CliRunner().invoke(main, ["bench", "compare", str(before), str(after)])
    assert outcome.exit_code == 0
    assert "answers: 1 equal, 1 different, 0 to other prompts, 1 in one run only" in outcome.output
    assert "ttft_p50_ms     1,000.00     1,000.00    1.000" in outcome.output


def test_compare_of_other_workloads(tmp_path: Path) -> None:
    """Answers to other prompts are no differing answers."""
    before = saved(tmp_path / "a.json", record(prompt_digest="p", text_digest="x"))
    after = saved(tmp_path / "b.json", record(prompt_digest="q", text_digest="z"))
    same = compare.same_answers(compare.load(before), compare.load(after))
    assert same == compare.SameAnswers(0, 0, num_other_prompt=1, num_in_one_only=0)


NO_RUNS = (
    "{", "[]", '{"a": 1}\n{', "[" * 200_000, '{"stages": null}', '{"stages": [1]}', '{"stages": [{"x": 1}]}',
    '{"stages": [{"rate": [1]}]}', '{"stages": [{"rate": "a"}]}', '{"stages": [{"rate": 1e999}]}',
)  # fmt: skip


@pytest.mark.parametrize("content", NO_RUNS)
def test_compare_with_what_is_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "a.requests.jsonl").write_text("")
    outcome = CliRunner().invoke(main, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "nothing.json")])
    assert outcome.exit_code == 1
    assert "is no saved run" in outcome.output


def test_compare_rate_by_rate(tmp_path: Path) -> None:
    stages = [{"rate": rate, **report.summarize(result(record(first_s=rate)), report.Slo())} for rate in (1.0, 2.0)]
    for name, kept in (("a", stages), ("b", stages[1:])):
        compare.save(tmp_path / f"{name}.json", compare.Run({"failed_requests": 0, "stages": kept}, []))
    lines = compare.lines(*(compare.load(tmp_path / f"{name}.json") for name in "ab"))
    assert "1 sessions/s, before only" in lines
    assert "ttft_p50_ms     2,000.00     2,000.00    1.000" in "\n".join(lines[lines.index("2 sessions/s") :])


def test_compare_with_a_run_that_has_no_such_figure(tmp_path: Path) -> None:
    """As one in which everything failed; and numbers that are too large to show."""
    for name, summary in (("a", {"ttft_p50_ms": 1.5, "hit_ratio": 10**400}), ("b", {"ttft_p50_ms": None})):
        compare.save(tmp_path / f"{name}.json", compare.Run(summary, [{}]))
    _, figure, answers = compare.lines(*(compare.load(tmp_path / f"{name}.json") for name in "ab"))
    assert figure.split() == ["ttft_p50_ms", "1.50", "-", "-"]
    assert answers.startswith("answers: 0 equal, 0 different")


def test_runs_lie_apart(tmp_path: Path) -> None:
    """Scenario: names with a dot, such as a temperature, shared one file of requests."""
    assert compare.requests_path(tmp_path / "run-0.5.json") == tmp_path / "run-0.5.requests.jsonl"


def test_a_cache_with_a_limit_forgets_what_was_used_longest_ago() -> None:
    """Also what a conversation goes on from."""
    tokens = {
        (session, turn): list(range(100 * session, 100 * session + 32 + 16 * turn))
        for session in range(3)
        for turn in range(2)
    }
    asked = [(0, 0, 0.0), (1, 0, 2.0), (2, 0, 4.0), (0, 1, 6.0)]
    records = [
        record(session=session, turn=turn, sent_s=at_s, end_s=at_s + 1.0, num_output_tokens=8)
        for session, turn, at_s in asked
    ]
    assert ideal_cached_tokens(records, tokens)[0, 1] == 32
    assert ideal_cached_tokens(records, tokens, max_blocks=6)[0, 1] == 32
    assert ideal_cached_tokens(records, tokens, max_blocks=4)[0, 1] == 0


def test_a_trace_is_not_overwritten(tmp_path: Path) -> None:
    trace = tmp_path / "t.requests.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n')
    for option in (["--output", str(tmp_path / "t.json")], ["--html", str(trace)]):
        outcome = CliRunner().invoke(main, ["bench", "trace", str(trace), *option])
        assert outcome.exit_code == 1
        assert "would overwrite the trace" in outcome.output


BAD_OPTIONS = {
    "": "--rate: one of --rate, --rates and --concurrency is needed",
    "--rate 1 --concurrency 2": "--concurrency: cannot be given with --rate",
    "--rate 0": "--rate: must be between",
    "--rate nan": "--rate: must be between",
    "--rates 2,1": "--rates: must rise",
    "--rates 1,x": "--rates: must be numbers",
    "--concurrency 0": "--concurrency: must be between",
    "--rate 1 --duration-s -1": "--duration-s: must be between",
    "--rate 1 --slo-ttft-ms -1": "--slo-ttft-ms: must be between",
    "--rate 1 --turns 0": "--turns: must be between",
    "--rate 1 --pause-s -1": "--pause-s: must be between",
    "--rate 1 --output-tokens -5": "--output-tokens: must be between",
    "--rate 1 --timeout-s 0": "--timeout-s: must be between",
    "--rate 1 --output /proc/none/load.json": "--output: cannot write /proc/none",
    "--rate 1 --output /": "--output: must end in .json",
    "--rate 1 --output load.txt": "--output: must end in .json",
    "--rate 1 --output /proc/load.json": "--output: cannot write /proc/load.json",
    "--rate 1 --html /proc/none/load.html": "--html: cannot write /proc/none",
    "--rate 1 --output load.json --html load.json": "--html: load.json is where the figures go",
    "--rate 1 --api-key a\u2028b": "--api-key: must be printable ASCII",
    "--rate 1 --url http://127.0.0.1:1": "no server at http://127.0.0.1:1",
    "--rate 1 --grpc 127.0.0.1:1": "no server at 127.0.0.1:1",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind either."""
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["bench", "chat", *options.split(" ")] if options else ["bench", "chat"])
    assert (outcome.exit_code, BAD_OPTIONS[options] in outcome.output) == (1, True), outcome.output
    assert not list(tmp_path.iterdir())


def test_outputs_behind_a_link(tmp_path: Path) -> None:
    """The link stays a link, and nothing is left where it leads."""
    link = tmp_path / "load.json"
    link.symlink_to(tmp_path / "elsewhere.json")
    options = ("--rate", "1", "--output", str(link), "--url", "http://127.0.0.1:1")
    assert CliRunner().invoke(main, ["bench", "chat", *options]).exit_code == 1
    assert link.is_symlink()
    assert not link.exists()


async def test_results_outlive_their_readers(tmp_path: Path) -> None:
    """Scenario: `pagoda bench ... 2>&1 | head -1`, with one rate and with several."""
    async with scripted_server(lambda *_: [*chat_answer("a")]) as server:
        for load in (("--concurrency", "1", "--sessions", "1"), ("--rates", "20,40", "--duration-s", "0.2")):
            output, page = tmp_path / "load.json", tmp_path / "load.html"
            options = (*load, "--url", server.url, "--output", str(output), "--html", str(page), "--turns", "1")
            command = [str(PAGODA), "bench", "chat", *options]
            process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
            assert process.stdout is not None
            await process.stdout.readline()
            process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
            assert await process.wait() == 0
            assert len(json.loads(output.read_text()).get("stages", [1, 1])) == 2
            assert page.exists()
            output.unlink()
            page.unlink()


async def pagoda(*arguments: str) -> None:
    """`pagoda bench` in a process of its own, which succeeds."""
    command = PAGODA
    process = await asyncio.create_subprocess_exec(command, "bench", *arguments, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_the_command_writes_figures_requests_and_a_page(tmp_path: Path) -> None:
    output, page = tmp_path / "out" / "load.json", tmp_path / "out" / "load.html"
    async with scripted_server(lambda *_: answered("a", "b")) as server:
        command = ["random", "--url", server.url, "--concurrency", "2", "--sessions", "5"]
        await pagoda(*command, "--output", str(output), "--html", str(page))
    summary = json.loads(output.read_text())
    assert (summary["workload"], summary["model"], summary["failed_requests"]) == ("random", "m", 0)
    assert len(compare.load(output).requests) == summary["num_requests"] == 5
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "http" not in text.split("<svg")[0]  # nothing is fetched
    assert "random on m" in text


async def test_rates_one_after_the_other(tmp_path: Path) -> None:
    output = tmp_path / "load.json"

    def script_of(_: str, body: dict[str, Any]) -> Script:
        return answered("a") if body["max_tokens"] == 1 else [head(429)]

    async with scripted_server(script_of) as server:
        command = ["random", "--url", server.url, "--rates", "20,40", "--duration-s", "0.3", "--no-ideal"]
        await pagoda(*command, "--output-tokens", "1", "--output", str(output))
    summary = json.loads(output.read_text())
    assert [stage["rate"] for stage in summary["stages"]] == [20, 40]
    assert len(compare.load(output).requests) == sum(stage["num_requests"] for stage in summary["stages"])
    assert summary["failed_requests"] == 0
    assert summary["knee_rate"] == 40
