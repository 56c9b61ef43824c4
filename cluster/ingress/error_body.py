"""The body of every error, as OpenAI clients expect it."""

from typing import Any

from pagoda.worker.quoting import MAX_QUOTED, shortened


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`param` is the field that is wrong."""
    param = None if param is None else shortened(param, MAX_QUOTED)
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": code}}
