"""Rules about the repository as tests."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "worker", "kernels", "proto")
CONTROL_PLANE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][-1]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_a_link_to_its_folder(name: str) -> None:
    """`src/pagoda/<name>` is a link, so that there is one copy of the code."""
    link = ROOT / "src" / "pagoda" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


def test_every_package_folder_is_listed_for_packaging() -> None:
    """A folder with an `__init__.py` that pyproject.toml forgets would be missing from the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        "pagoda." + ".".join(init.parent.relative_to(ROOT).parts)
        for name in PACKAGES
        for init in (ROOT / name).rglob("__init__.py")
    }
    assert found <= listed


@pytest.mark.parametrize("module", CONTROL_PLANE["source_modules"])
def test_control_plane_imports_only_the_standard_library(module: str) -> None:
    """import-linter sees written imports; this sees what is really loaded."""
    code = (
        f"import sys, {module}\n"
        "own = {name for name in sys.modules if name.startswith('pagoda')}\n"
        "known = set(sys.stdlib_module_names) | {'pagoda', '__main__', '__mp_main__'}\n"
        "foreign = {n.split('.')[0] for n in sys.modules} - known - {'_distutils_hack', 'sitecustomize'}\n"
        "print(sorted(n for n in foreign if not n.startswith('__editable__')))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_import_contracts_see_the_linked_packages(tmp_path: Path) -> None:
    """A contract that sees no modules would hold for ever: a torch import added to a copy must break it."""
    for name in ("pyproject.toml", "src", *PACKAGES):
        subprocess.run(["cp", "-a", str(ROOT / name), str(tmp_path / name)], check=True)
    with (tmp_path / "worker" / "block_pool.py").open("a") as file:
        file.write("\nimport torch\n")
    linter = Path(sys.executable).with_name("lint-imports")
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as c; c()"
    assert linter.exists()
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "pagoda.worker.block_pool -> torch" in result.stdout


def test_no_environment_variables_in_library_code() -> None:
    """What a thing needs comes in its constructor; only the edges may look at the environment."""
    edges = {ROOT / "cluster" / "app.py", ROOT / "cluster" / "commands" / "serve.py"}
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            if path not in edges:
                assert not names & {"environ", "getenv"}, path


def test_wall_clock_is_only_shown() -> None:
    """Clocks of machines are set back and forth. What counts intervals uses a monotonic one.

    These may look at the wall clock: answers that say when they were made, and a worker's start, whose number must be
    higher than that of the start before.
    """
    allowed = {"cluster/ingress/answers.py", "cluster/ingress/openai_api.py", "cluster/replica.py"}
    wall = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today"}
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            found = {
                node.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime", "date")
            }
            assert str(path.relative_to(ROOT)) in allowed or not found & wall, path


def test_every_dependency_is_explained() -> None:
    """docs/dependencies.md names each package that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert re.search(rf"\b{re.escape(name)}\b", explained), name


def test_every_dependency_is_pinned_for_ci() -> None:
    """constraints.txt pins each package that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        assert re.split(r"[\[<>=]", requirement)[0].lower() in pinned
