"""What an ingress makes of keys, and of a file that changes."""

from pathlib import Path

import pytest
import yaml

from pagoda.cluster.ingress.tenant_registry import TenantRegistry, UnauthenticatedError
from pagoda.cluster.tenants_file import TenantsFile, hash_of_key
from pagoda.worker.errors import ConfigError, InvalidRequestError


def write(path: Path, *keys: str) -> None:
    tenants = [{"name": key, "keys": [hash_of_key(key)], "secret": f"{key:*>32}"} for key in keys]
    write_text(path, yaml.safe_dump({"tenants": tenants}))


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "tenants.yaml", "a", "b")
    return tmp_path / "tenants.yaml"


@pytest.mark.parametrize("authorization", ["Bearer a", "bearer a", "BEARER  a "])
def test_valid_keys(path: Path, authorization: str) -> None:
    assert TenantRegistry(path).authenticate(authorization).name == "a"


@pytest.mark.parametrize(
    "authorization", [None, "", "a", "Bearer", "Bearer ", "Bearer A", "Basic a", "Bearer a b", "Bearer\ta"]
)
def test_keys_that_are_none(path: Path, authorization: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        TenantRegistry(path).authenticate(authorization)


def test_a_service_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TenantRegistry(tmp_path / "none.yaml")


async def test_a_file_that_changes_is_read_again_and_once(path: Path) -> None:
    seen: list[TenantsFile] = []
    registry = TenantRegistry(path, seen.append)
    await registry.refresh()
    assert len(seen) == 1
    write(path, "b", "new")
    await registry.refresh()
    await registry.refresh()
    assert len(seen) == 2
    assert registry.authenticate("Bearer new").name == "new"
    with pytest.raises(UnauthenticatedError):
        registry.authenticate("Bearer a")


async def test_what_cannot_be_used_leaves_all_as_it_was(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prefix that the chat template refuses is noticed only when it is tokenised."""

    def refuse(file: TenantsFile) -> None:
        if len(file.keys) == 1:
            raise InvalidRequestError("public_prefixes.0", "no")

    registry = TenantRegistry(path, refuse)
    write(path, "only")
    await registry.refresh()
    assert registry.authenticate("Bearer a").name == "a"
    assert "public_prefixes.0: no" in caplog.text


@pytest.mark.parametrize(
    "mistake",
    [
        "tenants: [{name: a, weight: 2024-99-99}]",
        'tenants: [{name: a}]\nsecret_file: "a\\0b"',
        "tenants: {2024-99-99: 1}",
        "tenants: !!float x",
        "tenants: !!timestamp 2024-99-99",
    ],
)
async def test_whatever_is_wrong_with_a_file_the_next_one_counts(
    path: Path, caplog: pytest.LogCaptureFixture, mistake: str
) -> None:
    """Scenario: an odd mistake ended the watching, and a key that was removed after it stayed good for ever."""
    registry = TenantRegistry(path)
    write_text(path, mistake)
    await registry.refresh()
    assert "stay as they were" in caplog.text
    assert registry.authenticate("Bearer a").name == "a"
    write(path, "b")
    await registry.refresh()
    with pytest.raises(UnauthenticatedError):
        registry.authenticate("Bearer a")


async def test_a_bug_does_not_end_the_watching(path: Path) -> None:
    def fail(file: TenantsFile) -> None:
        if len(file.keys) == 1:
            raise RuntimeError("bug")

    registry = TenantRegistry(path, fail)
    write(path, "only")
    await registry.refresh()
    write(path, "b", "c")
    await registry.refresh()
    assert registry.authenticate("Bearer c").name == "c"
