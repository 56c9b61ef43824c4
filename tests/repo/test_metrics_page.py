"""docs/metrics.md says what the processes expose."""

import re
from pathlib import Path

import pytest

from pagoda.cluster.ingress import metrics as ingress
from pagoda.worker import metrics as worker
from pagoda.worker.instruments import Definition
from pagoda.worker.prefix_lookup import MissReason

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
DEFINITIONS = [("worker", definition) for definition in worker.DEFINITIONS] + [
    ("ingress", definition) for definition in ingress.DEFINITIONS
]


def rows() -> list[tuple[str, ...]]:
    return [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in PAGE.splitlines()
        if line.startswith("| `pagoda_")
    ]


def test_table_is_what_is_defined() -> None:
    """Each metric once, with its type, labels and meaning."""
    assert rows() == [
        (f"`{d.name}`", d.kind, ", ".join(f"`{label}`" for label in (process, *d.labels)), d.help)
        for process, d in DEFINITIONS
    ]


@pytest.mark.parametrize(("process", "definition"), DEFINITIONS, ids=lambda it: getattr(it, "name", it))
def test_names_keep_to_the_conventions(process: str, definition: Definition) -> None:
    """Prefix, base units, `_total` on counters only, no labels that grow with the requests."""
    assert re.fullmatch(r"pagoda_[a-z0-9_]+", definition.name)
    assert definition.name.endswith("_total") == (definition.kind == "counter")
    assert not re.search(r"_(ms|milliseconds|us|kib|mib|percent)(_|$)", definition.name)
    if definition.kind == "histogram":
        assert definition.name.endswith("_seconds")
        assert list(definition.buckets) == sorted(set(definition.buckets))
    assert definition.help.endswith(".")
    assert not {"request_id", "request", "id", "le", process} & set(definition.labels)


def test_names_are_unique() -> None:
    names = [definition.name for _, definition in DEFINITIONS]
    assert len(set(names)) == len(names)


def test_reasons_of_misses_are_explained() -> None:
    assert {reason.value for reason in MissReason} == set(re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE)) - {
        row[0].strip("`") for row in rows()
    }
