"""What tenants can learn of each other, and do to each other, through the API. The lines of SECURITY.md name these."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from local_server import DEADLINE_S, LocalServer
from tiny_server import BLOCK_SIZE, COMPLETIONS, MODEL, assert_is_error, serve_tiny

from pagoda.cluster.tenants_file import hash_of_key

PUBLIC = " ".join(f"public {n}" for n in range(40))
SYSTEM = " ".join(f"system {n}" for n in range(40))
KEYS = {"alice": "key of alice", "bob": "key of bob", "root": "key of root"}
TENANTS: dict[str, Any] = {
    "tenants": [
        {"name": name, "keys": [hash_of_key(key)], "secret": f"{name:*>32}", "operator": name == "root"}
        for name, key in KEYS.items()
    ],
    "public_prefixes": [PUBLIC, [{"role": "system", "content": SYSTEM}]],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(yaml.safe_dump(TENANTS))
    return path


@pytest.fixture(scope="module")
def guarded(tiny: Path, file: Path) -> Iterator[LocalServer]:
    with serve_tiny(tiny, tenants_path=file) as server:
        yield server


@pytest.fixture
def server(guarded: LocalServer, file: Path) -> Iterator[LocalServer]:
    """As the file is at first, and with nothing cached."""
    yield guarded
    write(guarded, file, TENANTS)
    guarded.wait_until_idle()


def write(server: LocalServer, file: Path, content: Any) -> None:
    new = file.with_suffix(".new")
    new.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    os.replace(new, file)
    server.read_tenants_again()


def ask(server: LocalServer, name: str, path: str = "/v1/models", body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS.get(name, name)}"}
    return server.http.request("GET" if body is None else "POST", path, json=body, headers=headers)


def usage(server: LocalServer, name: str, prompt: str | list[int], **fields: Any) -> tuple[int, int]:
    """(prompt tokens, those of them that were found in the cache), after checking that the others were computed."""
    before = server.engine.stats().num_computed_tokens
    answer = ask(server, name, COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 1} | fields)
    assert answer.status_code == 200, answer.text
    server.wait_until_idle()
    found = answer.json()["usage"]
    num_prompt, num_cached = found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]
    # What an answer's time tells: the tokens that were computed for it.
    assert server.engine.stats().num_computed_tokens - before == num_prompt - num_cached
    return num_prompt, num_cached


def found_whole(num_prompt: int) -> int:
    """What is found of a prompt that was computed before: its full blocks, but for the last token."""
    return min(num_prompt // BLOCK_SIZE * BLOCK_SIZE, num_prompt - 1)


def secret_text(about: str) -> str:
    return " ".join(f"{about} {n}" for n in range(30))


# -- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/metrics", "/directory/stats", "/docs", "/nowhere"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer nobody's"}, {"Authorization": "Basic a2V5"}])
def test_nobody_without_a_valid_key(server: LocalServer, path: str, headers: dict[str, str]) -> None:
    answer = server.http.get(path, headers=headers)
    assert_is_error(answer, 401, None, code="invalid_api_key")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert answer.headers["X-Request-Id"]


def test_priority_below_zero_is_the_operators(server: LocalServer) -> None:
    """It goes before all tenants' turns: one could shut out the others. Above 0 whoever likes may wait longer."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    assert_is_error(ask(server, "alice", COMPLETIONS, body | {"priority": -1}), 400, "priority")
    assert ask(server, "alice", COMPLETIONS, body | {"priority": 5}).status_code == 200
    assert ask(server, "root", COMPLETIONS, body | {"priority": -1}).status_code == 200


def test_two_keys_in_one_request_are_none(server: LocalServer) -> None:
    """A proxy may have looked at the one and the server at the other."""
    keys = [("Authorization", f"Bearer {KEYS[name]}") for name in ("alice", "bob")]
    assert_is_error(server.http.get("/v1/models", headers=keys), 401, None, code="invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/version"])
def test_probes_need_no_key(server: LocalServer, path: str) -> None:
    assert server.http.get(path).status_code == 200


def test_the_body_of_a_stranger_is_not_read(server: LocalServer) -> None:
    """The answer is there while the body has not even begun."""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 401 ")


def test_openai_clients_bring_their_key(server: LocalServer) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEYS["alice"], max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="nobody's").models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/metrics", "/directory/stats"])
def test_what_all_do_only_an_operator_sees(server: LocalServer, path: str) -> None:
    assert_is_error(ask(server, "alice", path), 403, None, code="insufficient_permissions")
    assert ask(server, "root", path).status_code != 403


# -- the cache -----------------------------------------------------------------------------------


def test_no_tenant_finds_what_another_has_computed(server: LocalServer) -> None:
    """The very same prompt: neither the count nor the time of the answer tells that it was there before."""
    prompt = secret_text("nobody else finds")
    num_prompt, _ = usage(server, "alice", prompt)
    assert usage(server, "alice", prompt) == (num_prompt, found_whole(num_prompt))
    assert usage(server, "bob", prompt) == (num_prompt, 0)
    assert usage(server, "root", prompt) == (num_prompt, 0)


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_client_salts_set_apart_and_open_nothing(server: LocalServer, name: str) -> None:
    """Of the same tenant, too. A salt may try to be another tenant's secret, or to go on where a secret ends."""
    prompt = secret_text(f"salted for {name}")
    num_prompt, _ = usage(server, "alice", prompt, cache_salt="mine")
    secrets = [f"{tenant:*>32}" for tenant in KEYS]
    guesses = ["", "mine ", "Mine", *secrets, *(f"{secret}mine" for secret in secrets), "\4\0\0\0mine"]
    for guess in [*guesses, *(["mine"] if name != "alice" else [])]:
        assert usage(server, name, prompt, cache_salt=guess) == (num_prompt, 0), guess
    assert usage(server, "alice", prompt, cache_salt="mine") == (num_prompt, found_whole(num_prompt))


def test_tokens_that_spell_a_salt_open_nothing(server: LocalServer) -> None:
    """Tokens are hashed as bytes behind the salt's: those of a prompt must not be able to take its place."""
    prompt = [7] * (2 * BLOCK_SIZE)
    usage(server, "alice", prompt)
    as_tokens = list(f"{'alice':*>32}".encode())
    for guess in ([*as_tokens, *prompt], [*as_tokens[BLOCK_SIZE:], *prompt], prompt):
        assert usage(server, "bob", guess)[1] == 0


def test_a_long_salt_is_refused(server: LocalServer) -> None:
    body = {"model": MODEL, "prompt": "a", "cache_salt": "x" * 257}
    assert_is_error(ask(server, "alice", COMPLETIONS, body), 400, "cache_salt")


def test_a_public_prefix_is_shared_and_nothing_behind_it(server: LocalServer) -> None:
    """Bob finds whole blocks of the prefix that Alice has computed, and not the block in which her own text begins."""
    prompt = f"{PUBLIC} {secret_text('behind the prefix')}"
    num_prompt, _ = usage(server, "alice", prompt)
    _, num_shared = usage(server, "bob", prompt)
    num_public = len(ask(server, "bob", "/tokenize", {"model": MODEL, "prompt": PUBLIC}).json()["tokens"])
    assert 0 < num_shared <= num_public
    assert num_shared > num_public - 2 * BLOCK_SIZE
    assert usage(server, "bob", prompt) == (num_prompt, found_whole(num_prompt))
    assert usage(server, "root", prompt, cache_salt="x") == (num_prompt, num_shared)


def test_a_public_system_prompt_is_shared(server: LocalServer) -> None:
    counts = []
    for name in ("alice", "bob"):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"I am {name}"}]
        answer = ask(server, name, "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 1})
        counts.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == 0
    assert counts[1] >= 5 * BLOCK_SIZE


# -- keys that come and go -----------------------------------------------------------------------


def test_keys_come_and_go_while_the_service_runs(server: LocalServer, file: Path) -> None:
    alice, bob, root = TENANTS["tenants"]
    write(server, file, TENANTS | {"tenants": [alice | {"keys": [hash_of_key("new key")]}, bob, root]})
    assert ask(server, "alice").status_code == 401
    assert ask(server, "new key").status_code == 200
    assert ask(server, "bob").status_code == 200


@pytest.mark.parametrize("content", ["tenants: [", "tenants: [{name: x, color: red}]", "", "public_prefixes: 3"])
def test_a_broken_file_changes_nothing(server: LocalServer, file: Path, content: str) -> None:
    """Somebody is just writing it, or has made a mistake: whoever was served is served."""
    write(server, file, content)
    assert ask(server, "alice").status_code == 200
    assert ask(server, "nobody's").status_code == 401
    file.unlink()
    server.read_tenants_again()
    assert ask(server, "alice").status_code == 200


def test_prefixes_come_and_go_too(server: LocalServer, file: Path) -> None:
    prompt = secret_text("declared later")
    usage(server, "alice", prompt)
    assert usage(server, "bob", prompt)[1] == 0
    write(server, file, TENANTS | {"public_prefixes": [prompt]})
    assert usage(server, "root", prompt)[1] == 0  # what was private yesterday is computed anew, for all
    assert usage(server, "bob", prompt)[1] > 0
