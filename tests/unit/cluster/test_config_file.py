"""`pagoda serve --config`: what the file says, what the command line says, and what is wrong with a file."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pagoda.cluster.cli import main
from pagoda.cluster.commands.config_file import file_options
from pagoda.cluster.commands.serve import serve


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGODA_MODEL_CACHE", raising=False)


def invoke(folder: Path, content: str, *options: str) -> Result:
    path = folder / "pagoda.yaml"
    path.write_text(content, encoding="utf-8")
    return CliRunner().invoke(main, ["serve", "--config", str(path), *options])


def resolved(folder: Path, content: str, *options: str) -> dict[str, Any]:
    result = invoke(folder, content, *options, "--print-config")
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def error(folder: Path, content: str) -> str:
    """What is wrong, in one line, behind the file's name. Nothing has been printed or begun."""
    result = invoke(folder, content)
    assert result.exit_code == 1
    assert result.stdout == ""
    return result.stderr.strip().removeprefix(f"Error: {folder / 'pagoda.yaml'}: ")


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    found = resolved(tmp_path, "port: 8311\nkv-cache-gib: 2\nworkers: 3\ningresses: 2\n", "--port", "8312")
    assert found["port"] == 8312
    assert (found["kv-cache-gib"], found["workers"], found["ingresses"]) == (2, 3, 2)
    assert found["block-size"] == 16


def test_switches(tmp_path: Path) -> None:
    assert resolved(tmp_path, "prefix-caching: false")["prefix-caching"] is False
    assert resolved(tmp_path, "prefix-caching: false", "--prefix-caching")["prefix-caching"] is True


def test_printed_config_is_a_config(tmp_path: Path) -> None:
    """It names every option; given back, it says the same."""
    first = resolved(tmp_path, "model: /models/日本\nport: 8311\nmax-model-len: 512\n")
    assert set(first) == set(file_options(serve))
    assert resolved(tmp_path, yaml.safe_dump(first)) == first


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}", "port: null"])
def test_file_that_asks_for_nothing(tmp_path: Path, content: str) -> None:
    assert resolved(tmp_path, content)["port"] == 8000


def test_home_folder(tmp_path: Path) -> None:
    """No shell has seen the file before us."""
    assert resolved(tmp_path, "model-cache: ~/models")["model-cache"] == str(Path.home() / "models")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 8000", "prot: unknown option; did you mean port?"),
        ("kv_cache_gib: 1", "kv_cache_gib: unknown option; did you mean kv-cache-gib?"),
        ("no-prefix-caching: true", "no-prefix-caching: unknown option; did you mean prefix-caching?"),
        ("config: other.yaml", "config: unknown option"),
        ("8000: port", "8000: unknown option"),
        ('port: "8000"', "port: must be a whole number, got '8000'"),
        ("port: 8000.5", "port: must be a whole number, got 8000.5"),
        ("port: true", "port: must be a whole number, got True"),
        ("workers: [1]", "workers: must be a whole number, got [1]"),
        ("drain-s: soon", "drain-s: must be a number, got 'soon'"),
        ("kv-cache-gib: yes", "kv-cache-gib: must be a number, got True"),
        ("prefix-caching: 1", "prefix-caching: must be true or false, got 1"),
        ("model: 7", "model: must be text, got 7"),
        ("model-cache: {a: b}", "model-cache: must be text, got {'a': 'b'}"),
        ("dtype: int8", "dtype: must be one of auto, bfloat16, float16, float32, got 'int8'"),
        ("port: 1\nport: 2", "port: given twice"),
        ("- port", "must be a mapping of options to values"),
        ("port: [", "not valid YAML: "),
        ("? {a: b}\n: 1", "not valid YAML: "),
        ("port: !!python/object:os.system 1", "not valid YAML: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, said: str) -> None:
    assert error(tmp_path, content).startswith(said)


def test_value_out_of_range(tmp_path: Path) -> None:
    """As on the command line."""
    result = invoke(tmp_path, "port: 70000")
    assert result.exit_code == 1
    assert "--port: must be between 1 and 65535, got 70000" in result.stderr


def test_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", "--config", str(tmp_path / "none.yaml")])
    assert result.exit_code == 1
    assert "none.yaml: cannot be read: " in result.stderr


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "pagoda.yaml").write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(main, ["serve", "--config", str(tmp_path / "pagoda.yaml")])
    assert result.exit_code == 1
    assert "cannot be read: " in result.stderr
