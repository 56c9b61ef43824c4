"""The file of tenants: what it says, what is wrong with it, and the command that writes it."""

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pagoda.cluster.cli import main
from pagoda.cluster.tenants import Tenant, TenantLimits
from pagoda.cluster.tenants_file import hash_of_key, parse_tenants, read_tenants_file
from pagoda.worker.errors import ConfigError

SECRET = "s" * 32
ACME: dict[str, Any] = {"name": "acme", "keys": [hash_of_key("key")], "secret": SECRET}


def test_everything_it_can_say(tmp_path: Path) -> None:
    (tmp_path / "cluster.secret").write_bytes(bytes(32))
    path = tmp_path / "tenants.yaml"
    path.write_text(f"""
tenants:
  - name: acme
    keys: ["{hash_of_key("one")}", "{hash_of_key("two")}"]
    secret: {SECRET}
    weight: 2
    operator: true
    limits: {{max_concurrent_requests: 8, requests_per_minute: 600, tokens_per_minute: 100000}}
  - name: other
    keys: ["{hash_of_key("three")}"]
secret_file: cluster.secret
public_prefixes:
  - "Translate:"
  - [{{role: system, content: Be kind.}}]
""")
    file = read_tenants_file(path)
    acme = Tenant("acme", 2.0, SECRET.encode(), TenantLimits(8, 600, 100000), is_operator=True)
    assert file.tenant_of("one") == file.tenant_of("two") == acme
    other = file.tenant_of("three")
    assert other is not None
    assert (other.name, other.is_operator, len(other.secret)) == ("other", False, 32)
    assert file.public_prefixes == ("Translate:", ({"role": "system", "content": "Be kind."},))


@pytest.mark.parametrize("key", ["", "ONE", "one ", "on", "one\0", "\ud800", hash_of_key("one")])
def test_a_key_that_is_nearly_right_is_nobodys(key: str) -> None:
    """The hash too, which is what a thief of the file has."""
    file = parse_tenants({"tenants": [ACME | {"keys": [hash_of_key("one")]}]}, Path("f"))
    assert file.tenant_of(key) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "body: Input should be a valid dictionary"),
        ({}, "tenants: Field required"),
        ({"tenants": [], "tenant": []}, "tenant: is unknown"),
        ({"tenants": [ACME | {"key": "k"}]}, "tenants.0.key: is unknown"),
        ({"tenants": [ACME | {"weight": 0}]}, "tenants.0.weight: must be a number > 0, got 0"),
        ({"tenants": [ACME | {"weight": "2"}]}, "tenants.0.weight: Input should be a valid number"),
        ({"tenants": [ACME | {"weight": float("nan")}]}, "tenants.0.weight: must be a number > 0, got nan"),
        ({"tenants": [ACME | {"limits": {"rpm": 1}}]}, "tenants.0.limits.rpm: is unknown"),
        ({"tenants": [ACME | {"limits": {"tokens_per_minute": -1}}]}, "tenants.0.limits.tokens_per_minute: must be"),
        ({"tenants": [ACME | {"name": "a b"}]}, "tenants.0.name: must be"),
        ({"tenants": [ACME | {"keys": ["sk-123"]}]}, "tenants.0.keys: must be sha256:"),
        ({"tenants": [ACME | {"secret": "short"}]}, "tenants.0.secret: must have at least 32"),
        ({"tenants": [ACME | {"secret": None}]}, "tenants.0.secret: is missing"),
        ({"tenants": [ACME, ACME | {"keys": [], "secret": "t" * 32}]}, "tenants.name: one is there twice"),
        ({"tenants": [ACME, ACME | {"keys": [], "name": "b"}]}, "tenants.secret: one is there twice"),
        ({"tenants": [ACME, ACME | {"name": "b", "secret": "t" * 32}]}, "tenants.keys: one is there twice"),
        ({"tenants": [ACME], "secret_file": "none"}, "secret_file: cannot be read"),
        ({"tenants": [], "public_prefixes": [3]}, "public_prefixes.0"),
        ({"tenants": [], "public_prefixes": ["a"] * 1025}, "public_prefixes: may be 1024"),
    ],
)
def test_what_is_wrong_is_named(content: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(content, Path("tenants.yaml"))
    assert str(caught.value).startswith(f"tenants.yaml: {message}")
    assert "sk-123" not in str(caught.value)


def add(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main, ["tenants", "add", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_a_key_is_printed_once_and_only_its_hash_kept(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    keys = [add("acme", "--file", path, "--weight", 2, "--operator"), add("acme", "--file", path)]
    keys.append(add("other", "--file", path))
    file = read_tenants_file(path)
    owners = [file.tenant_of(key) for key in keys]
    assert [owner and owner.name for owner in owners] == ["acme", "acme", "other"]
    assert [owner and owner.is_operator for owner in owners] == [True, True, False]
    assert len({key[-43:] for key in keys}) == 3
    assert not any(key in path.read_text() for key in keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: a, colour: red}]")
    result = CliRunner().invoke(main, ["tenants", "add", "b", "--file", str(path)])
    assert result.exit_code == 1
    assert "tenants.0.colour: is unknown" in result.output
    assert yaml.safe_load(path.read_text()) == {"tenants": [{"name": "a", "colour": "red"}]}


def test_serve_refuses_a_broken_file_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: a}]")
    result = CliRunner().invoke(main, ["serve", "--tenants", str(path), "--print-config"])
    assert result.exit_code == 1
    assert "tenants.0.secret: is missing" in result.output
