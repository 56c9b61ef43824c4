"""What is wrong with a body, in one line that names the field."""

from collections.abc import Sequence
from typing import Any

from pagoda.worker.quoting import MAX_QUOTED, shortened


def first_problem(problems: Sequence[Any]) -> tuple[str, str]:
    """(field, message) of the first of pydantic's `errors()`; the field is `body` if all of it is meant.

    A value that may be of several types fails once for each; shown is the type that it came closest to.
    """
    first = problems[0]["loc"][:1]
    problem = max(
        (problem for problem in problems if problem["loc"][:1] == first),
        key=lambda problem: (len(problem["loc"]), [part for part in problem["loc"] if isinstance(part, int)]),
    )
    if problem["type"] == "json_invalid":
        return "body", f"body: not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
    # The location also names the members of a union ("str", "list[int]").
    location = [str(part) for part in problem["loc"] if part not in ("str", "int") and "[" not in str(part)]
    if problem["type"] == "unsupported_field":
        location.append(problem["ctx"]["field"])
    field = shortened(".".join(location), MAX_QUOTED) or "body"
    message = {"unsupported_field": "is not supported", "extra_forbidden": "is unknown"}.get(problem["type"])
    return field, shortened(f"{field}: {message or problem['msg']}")
