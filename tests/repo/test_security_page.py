"""SECURITY.md names a test for each threat, and each of these is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(test_\w+)(?:\.py)?`")


def test_each_threat_has_a_test_that_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    threats = [line for line in page.partition("| threat |")[2].partition("\n\n")[0].splitlines() if " | " in line][1:]
    assert len(threats) > 15
    files = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    definition = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
    functions = {name for text in files.values() for name in definition.findall(text)}
    for threat in threats:
        names = NAMED.findall(threat)
        assert names, f"no test: {threat}"
        assert not set(names) - files.keys() - functions, threat
