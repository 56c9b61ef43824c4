"""The README's commands exist and its snippets are what the code understands."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from pagoda.cluster.cli import main
from pagoda.cluster.ingress.schemas import ChatCompletionRequest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    README,
    (ROOT / "CONTRIBUTING.md").read_text(),
    *((ROOT / "docs" / name).read_text() for name in ("load-testing.md", "chaos.md")),
]


def _commands(program: str) -> list[list[str]]:
    """Arguments of every call of `program` in the documents' shell blocks."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", document, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in line.split("#")[0].split("|"):
                    words = shlex.split(part) if part.count("'") % 2 == 0 else []
                    if words and Path(words[0]).name == program:
                        found.append(words[1:])
    return found


@pytest.mark.parametrize("arguments", _commands("make"), ids=" ".join)
def test_make_targets_exist(arguments: list[str]) -> None:
    """`make` knows every target that the documents name."""
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("arguments", _commands("pagoda"), ids=" ".join)
def test_pagoda_commands_and_options_exist(arguments: list[str]) -> None:
    """Each documented call names a command and options that there are."""
    command: click.Command = main
    while isinstance(command, click.Group) and arguments:
        found = command.get_command(click.Context(command), arguments[0])
        assert found is not None, arguments[0]
        command, arguments = found, arguments[1:]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {argument for argument in arguments if argument.startswith("--")} <= known


def test_curl_body_is_a_valid_request() -> None:
    """The body that the README sends parses."""
    body = re.search(r"-d '(\{.*?\n\})'", README, re.DOTALL)
    assert body is not None
    assert ChatCompletionRequest.model_validate_json(body[1]).model == json.loads(body[1])["model"]


def test_python_snippets_compile() -> None:
    """The Python blocks are Python."""
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippets
    for snippet in snippets:
        compile(snippet, "README.md", "exec")


def test_links_lead_somewhere() -> None:
    """Every relative link of the README names a file."""
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)
