"""The `pagoda` command: what is wrong is said in one line, before any work; what is right works."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny_model import write_tiny_model

from pagoda import __version__
from pagoda.cluster.cli import main
from pagoda.cluster.listening import HOSTS, problem_with_listening
from pagoda.worker.errors import ConfigError
from pagoda.worker.model_store import ModelStore


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, at most 512 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a model, fetching one or loading one fails the test."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(ModelStore, "resolve", fail)
    monkeypatch.setattr(ModelStore, "fetch", fail)
    monkeypatch.setattr("pagoda.cluster.commands.generate.AsyncEngine", fail)


def invoke(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def error(*arguments: str | Path, stdin: str = "") -> str:
    """What a command that must fail says at the end, in one line; nothing must come on standard output."""
    result = invoke(*arguments, stdin=stdin)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    return last.removeprefix("Error: ")


def test_version() -> None:
    assert invoke("--version").stdout == f"pagoda, version {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [(), ("serve",), ("generate",), ("model",), ("model", "fetch"), ("model", "list"), ("model", "inspect")],
)
def test_help(command: tuple[str, ...]) -> None:
    result = invoke(*command, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: main " + " ".join(command))


def test_interrupt_while_a_command_is_imported(tmp_path: Path) -> None:
    """Torch takes seconds; here it takes for ever. Ctrl-C ends that without a word."""
    (tmp_path / "torch.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    command = [sys.executable, "-c", "from pagoda.cluster.cli import main; main()", "doctor"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT


# -- options -------------------------------------------------------------------------------------

BAD_ENGINE_OPTIONS = [
    ("--block-size", "0"),
    ("--block-size", "1025"),
    ("--kv-cache-gib", "0"),
    ("--kv-cache-gib", "-1"),
    ("--kv-cache-gib", "nan"),
    ("--kv-cache-gib", "inf"),
    ("--max-num-seqs", "0"),
    ("--max-num-batched-tokens", "0"),
    ("--max-num-waiting", "0"),
    ("--max-model-len", "1"),
    ("--threads", "0"),
    ("--tp", "0"),
    ("--tp", "1025"),
    ("--dtype", "int8"),
    ("--block-size", "x"),
    ("--model", ""),
]
BAD_SERVE_OPTIONS = [
    ("--port", "0"),
    ("--port", "65536"),
    ("--workers", "0"),
    ("--workers", "-1"),
    ("--drain-s", "-1"),
    ("--drain-s", "nan"),
    ("--log-level", "loud"),
    ("--ingresses", "0"),
    ("--served-model-name", ""),
    ("--max-body-mib", "0"),
    ("--max-body-mib", "nan"),
    ("--grpc-port", "65536"),
]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *(("serve", *bad) for bad in BAD_ENGINE_OPTIONS + BAD_SERVE_OPTIONS),
        *(("generate", *bad) for bad in BAD_ENGINE_OPTIONS),
    ],
)
def test_bad_option_names_itself_before_any_work(command: str, option: str, value: str) -> None:
    """A typing mistake must not cost a download or the loading of a model first."""
    said = error(command, option, value)
    assert option in said
    if command == "serve":
        assert error(command, option, value, "--print-config") == said


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_device_that_is_not_there(command: str, tiny: Path) -> None:
    assert error(command, "--model", tiny, "--device", "abacus") == "--device: 'abacus' is not a torch device"


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_context_that_the_model_cannot_have(command: str, tiny: Path) -> None:
    said = error(command, "--model", tiny, "--max-model-len", "513")
    assert said == "--max-model-len: 513 is more than this model can, 512"


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (("serve",), "warning"),
        (("-v", "serve"), "info"),
        (("serve", "--log-level", "debug"), "debug"),
        (("-v", "serve", "--log-level", "error"), "error"),
    ],
)
def test_log_level_of_the_service(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], level: str) -> None:
    """Quiet, unless the whole command is verbose; what is said for the service itself counts most."""
    levels = []

    def take(**settings: Any) -> None:
        levels.append(settings["log_level"])
        raise ConfigError("everything", "that is all")

    monkeypatch.setattr("pagoda.cluster.commands.serve.ClusterConfig", take)
    assert error(*arguments) == "everything: that is all"
    assert levels == [level]


@pytest.mark.parametrize("command", [("serve", "--model"), ("generate", "--model"), ("model", "fetch")])
def test_unknown_model(command: tuple[str, ...], tmp_path: Path) -> None:
    said = error(*command, "no-such-model", "--model-cache", tmp_path)
    assert said.startswith("unknown model 'no-such-model'; known: smollm2-135m")


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize("folder", [".", "missing"])
def test_path_that_is_no_model_folder(command: str, folder: str, tmp_path: Path) -> None:
    said = error(command, "--model", tmp_path / folder)
    assert str(tmp_path) in said
    assert "not a Hugging Face model folder" in said


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_model_folder_without_weights(command: str, tmp_path: Path) -> None:
    """An interrupted copy: the file that is missing is named, not a stack trace shown."""
    (write_tiny_model(tmp_path) / "model.safetensors").unlink()
    assert "model.safetensors missing" in error(command, "--model", tmp_path)


def test_a_broken_tokenizer_is_named_before_weights_are_loaded(tmp_path: Path) -> None:
    (write_tiny_model(tmp_path) / "tokenizer.json").write_text("{")
    result = invoke("generate", "--model", tmp_path, stdin='{"prompt": "a"}')
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path}: its tokenizer cannot be loaded: ")


@pytest.mark.parametrize(("arguments", "name"), [((), "smollm2-135m"), (("org/other",), "org/other")])
def test_fetch_takes_the_model_that_is_served_by_default(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], name: str
) -> None:
    fetched = []
    monkeypatch.setattr(ModelStore, "fetch", lambda _store, name, **_options: fetched.append(name))
    assert invoke("model", "fetch", *arguments).exit_code == 0
    assert fetched == [name]


def test_list_without_any_model(tmp_path: Path) -> None:
    """Models that could be fetched are listed before the first one is."""
    result = invoke("model", "list", "--model-cache", tmp_path / "not there yet")
    assert result.exit_code == 0
    assert result.stdout.startswith("smollm2-135m\tnot fetched\t")


# -- where to listen -----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("host", ["::1", "::", "192.0.2.1", "no.such.host", "127.0.0.2", ""])
def test_host_that_cannot_be_served(host: str) -> None:
    """It is the host that is wrong, not the port; and it must not look served while every request fails."""
    assert error("serve", "--host", host) == f"--host: must be one of 127.0.0.1, localhost, 0.0.0.0, got {host!r}"


@pytest.mark.parametrize("host", HOSTS)
def test_port_that_is_taken(host: str, tiny: Path) -> None:
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        said = error("serve", "--model", tiny, "--host", host, "--port", str(port))
        assert said == f"--port: cannot listen on {host}:{port}: Address already in use"
    assert problem_with_listening(host, port) is None


# -- generate: bad lines -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "body: not valid JSON: "),
        ("[]", "body: "),
        ("{}", "prompt: give either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "prompt: give either prompt or messages"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens: "),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: "),
        ('{"prompt": "a", "temperature": NaN}', "temperature: "),
        ('{"prompt": "a", "logprobs": true}', "logprobs: is not supported"),
        ('{"prompt": "a", "temprature": 1}', "temprature: is unknown"),
        ('{"prompt": "a", "stream": true}', "stream: is unknown"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: "),
    ],
)
def test_bad_line_is_named_before_any_work(line: str, said: str) -> None:
    """The second of three lines is wrong; blank lines count, as an editor counts them."""
    good = '{"prompt": "a"}'
    assert error("generate", stdin=f"{good}\n\n{line}\n{good}\n").startswith(f"line 3: {said}")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("option", "value"), [("--max-tokens", "0"), ("--temperature", "nan"), ("--seed", "-1")])
def test_bad_default_for_lines(option: str, value: str) -> None:
    said = error("generate", option, value, stdin='{"prompt": "a"}')
    assert option.removeprefix("--").replace("-", "_") in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": [1, 999]}, "line 2: prompt: token ids must be in [0, 259)"),
        ({"prompt": []}, "line 2: prompt: must hold at least one token"),
        ({"prompt": "x" * 512}, "line 2: prompt: is 512 tokens long"),
        ({"prompt": "x", "max_tokens": 512}, "line 2: max_tokens: 512 is too much"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "line 2: messages: the model's chat template refuses them: system comes first",
        ),
    ],
)
def test_line_that_the_model_cannot_take(line: dict[str, Any], said: str, tiny: Path) -> None:
    """Only the tokenizer and the model know; still nothing is generated."""
    lines = f"{json.dumps({'prompt': 'a'})}\n{json.dumps(line)}\n"
    assert error("generate", "--model", tiny, stdin=lines).startswith(said)


# -- generate: what works ------------------------------------------------------------------------


def generate(tiny: Path, *lines: dict[str, Any], options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    arguments = ["generate", "--model", tiny, "--kv-cache-gib", "0.01", *options]
    result = invoke(*arguments, stdin="".join(json.dumps(line) + "\n" for line in lines))
    assert result.exit_code == 0, result.stderr
    # Lines end with "\n" only: a random answer may hold U+0085 or U+2028, where `splitlines` would cut.
    return [json.loads(line) for line in result.stdout.split("\n") if line]


def test_generate(tiny: Path) -> None:
    """Text, tokens and messages: one result per line, in the order of the lines, although the first takes longest."""
    lines = [
        {"id": "long", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True},
        {"id": 7, "prompt": [5, 6, 7], "max_tokens": 3, "n": 2, "temperature": 0},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    ]
    first, second, third = generate(tiny, *lines)
    assert [(result["index"], result["id"]) for result in (first, second, third)] == [(0, "long"), (1, 7), (2, None)]
    assert first["usage"]["prompt_tokens"] == len("Hello")
    assert first["usage"]["completion_tokens"] == 200
    assert [choice["index"] for choice in second["choices"]] == [0, 1]
    assert second["choices"][0]["text"] == second["choices"][1]["text"]
    assert second["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert {choice["finish_reason"] for result in (first, second) for choice in result["choices"]} == {"length"}


def test_generate_defaults_for_lines(tiny: Path) -> None:
    """Options fill in what a line leaves out, and only that; the same seed brings the same text."""
    options = ("--max-tokens", "4", "--seed", "1")
    first, second, other = generate(
        tiny, {"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 2, "max_tokens": 5}, options=options
    )
    assert first["choices"] == second["choices"]
    assert first["usage"]["completion_tokens"] == 4
    assert other["usage"]["completion_tokens"] == 5
    assert not other["choices"][0]["text"].startswith(first["choices"][0]["text"])


def test_generate_takes_both_names_of_max_tokens(tiny: Path) -> None:
    """A line's own wins over the default for lines without any."""
    fields = ({"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}, {})
    stdin = "\n".join(json.dumps({"prompt": "a", "ignore_eos": True} | more) for more in fields)
    result = invoke("generate", "--model", tiny, "--max-tokens", "5", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    outputs = [json.loads(line) for line in result.stdout.splitlines()]
    assert [output["usage"]["completion_tokens"] for output in outputs] == [3, 3, 5]


def test_generate_stop_string(tiny: Path) -> None:
    """The text ends before the stop string, which some other answer showed to come."""
    line = {"prompt": "a", "max_tokens": 100, "seed": 3, "ignore_eos": True}
    (whole,) = generate(tiny, line)
    text = whole["choices"][0]["text"]
    stop = text[20:23]
    (stopped,) = generate(tiny, line | {"stop": stop})
    assert stopped["choices"] == [{"index": 0, "text": text[: text.index(stop)], "finish_reason": "stop"}]
    assert stopped["usage"]["completion_tokens"] < 100


def test_generate_more_samples_than_may_wait(tiny: Path) -> None:
    """Many lines of many samples each, more than the engine takes at a time: offline, that is no reason to refuse."""
    lines = [{"prompt": "a", "n": 8, "max_tokens": 2, "stop": "b"}] * 8
    options = ("--max-num-seqs", "2", "--max-num-waiting", "10")
    results = generate(tiny, *lines, options=options)
    assert [len(result["choices"]) for result in results] == [8] * 8


def test_generate_without_lines(tiny: Path) -> None:
    assert generate(tiny) == []


def test_generate_into_a_file(tiny: Path, tmp_path: Path) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "日本", "max_tokens": 1}\n', encoding="utf-8")
    result = invoke("generate", "--model", tiny, "--kv-cache-gib", "0.01", "--input", source, "--output", sink)
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(sink.read_text(encoding="utf-8"))["usage"]["prompt_tokens"] == 6


def test_generate_with_an_engine_that_dies(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step fails: the reason is said in one line, and the command ends."""

    def fail(*_args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("pagoda.worker.runner.Runner.execute", fail)
    said = error("generate", "--model", tiny, "--kv-cache-gib", "0.01", stdin='{"prompt": "a"}\n')
    assert "out of memory" in said
