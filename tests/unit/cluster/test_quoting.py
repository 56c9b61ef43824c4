"""What is quoted of a client's input is bounded."""

import pytest

from pagoda.worker.quoting import MAX_QUOTED, quoted, shortened


@pytest.mark.parametrize(
    ("text", "max_length", "expected"),
    [("", 5, ""), ("abcde", 5, "abcde"), ("abcdef", 5, "ab…ef"), ("abcdefg", 4, "ab…g"), ("x" * 10**6, 3, "x…x")],
)
def test_middle_is_left_out(text: str, max_length: int, expected: str) -> None:
    assert shortened(text, max_length) == expected
    assert len(expected) <= max_length


def test_quoted_is_one_line() -> None:
    assert quoted("a\nb") == "'a\\nb'"
    assert len(quoted("x" * 10**6)) == MAX_QUOTED + 2
