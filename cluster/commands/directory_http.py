"""Asks a service over HTTP what its prefix directory knows."""

from pathlib import Path
from typing import Any

import httpx

from pagoda.cluster.chat_client import authorization, root_url
from pagoda.cluster.commands.credentials import trust
from pagoda.worker.errors import PagodaError

_DEADLINE_S = 10.0


class NoAnswerError(PagodaError):
    """The service does not say what was asked."""


def ask(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    api_key: str | None = None,
    ca_cert: Path | None = None,
) -> dict[str, Any]:
    """The JSON at `path`. Raises `NoAnswerError`, and `ConfigError` for credentials that are none."""
    root, headers, context = root_url(url), authorization(api_key), trust(ca_cert)
    try:
        with httpx.Client(base_url=root, timeout=_DEADLINE_S, headers=headers, verify=context) as http:
            response = http.get(path) if body is None else http.post(path, json=body)
        answer = response.json()
        if response.status_code != 200:
            raise NoAnswerError(f"{root} answers {response.status_code}: {answer['error']['message']}")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise NoAnswerError(f"no server answers at {root}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NoAnswerError(f"{root} is no Pagoda service") from error
    if not isinstance(answer, dict):
        raise NoAnswerError(f"{root} is no Pagoda service")
    return answer
