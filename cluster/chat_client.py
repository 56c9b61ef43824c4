"""A client of an OpenAI chat API, as small as a terminal chat needs it: streaming, one answer at a time."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from pagoda.cluster.openai_stream import EventSplitter, NotAnEventError, StreamEvent, parse_event, problem_with_type
from pagoda.worker.errors import ConfigError, PagodaError

Message = dict[str, str]
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 600.0
"""Between two pieces of an answer; a long prompt on a busy CPU takes minutes."""
_MAX_EVENT_BYTES = 8 * 2**20
_CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if code not in (9, 10)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def root_url(url: str) -> str:
    """An OpenAI server's address as users give it, with or without scheme and `/v1`, as `http://host:port`."""
    root = url.rstrip("/").removesuffix("/v1")
    return root if "://" in root else f"http://{root}"


def printable(text: str) -> str:
    """Without what would steer a terminal."""
    return text.translate(_CONTROL_PICTURES)


def authorization(api_key: str | None) -> dict[str, str] | None:
    """The header for a key, if there is one. Raises `ConfigError`."""
    if not api_key:
        return None
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("api_key", "must be printable ASCII")
    return {"Authorization": f"Bearer {api_key}"}


class ChatError(PagodaError):
    """The server cannot be reached, or refuses, or breaks off."""


@dataclass(slots=True)
class Answer:
    """One answer as it grows, and what it took."""

    text: str = ""
    finish_reason: str | None = None
    """None as long as it is not complete."""
    ttft_s: float | None = None
    """From sending the request to the first text."""
    decode_s: float = 0.0
    """From the first text, or the first thought that came before it, to the end."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed behind the first token."""
        if self.num_output_tokens is None or self.num_output_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.num_output_tokens - 1) / self.decode_s


class ChatClient:
    """Talks to one server. Not for several threads."""

    def __init__(
        self, url: str, *, api_key: str | None = None, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        """`url` is the server's, with or without `/v1`; `options` are httpx's. Raises `ChatError`."""
        self._url = root_url(url)
        self._clock = clock
        with self._errors():
            if not httpx.URL(self._url).host:
                raise httpx.InvalidURL("it names no host")
            self._http = httpx.Client(
                base_url=f"{self._url}/v1",
                headers=authorization(api_key),
                timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                **options,
            )

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names of the models that are served. Raises `ChatError`."""
        with self._errors():
            response = self._http.get("/models")
            _check(response)
            try:
                return [str(model["id"]) for model in response.json()["data"]]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ChatError(f"{self._url} does not answer as an OpenAI API does") from error

    def ask(
        self, model: str, messages: Sequence[Message], sampling: dict[str, Any], answer: Answer
    ) -> Generator[str, None, None]:
        """Stream an answer: yields pieces of text and fills `answer`. Raises `ChatError`.

        Closing the iterator closes the connection, by which the server knows to stop.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        begin = self._clock()
        first = first_text = None
        with self._errors(), self._http.stream("POST", "/chat/completions", json=body) as response:
            if not response.is_success:
                response.read()
            _check(response)
            for event in _events(response):
                _note(event, answer)
                if not (event.text or event.reasoning):
                    continue
                now = self._clock()
                first = now if first is None else first
                answer.decode_s = now - first
                if event.text:
                    first_text = now if first_text is None else first_text
                    answer.ttft_s = first_text - begin
                    answer.text += event.text
                    yield event.text
        if answer.finish_reason is None:
            problem = problem_with_type(response.headers.get("content-type")) if first is None else ""
            raise ChatError(printable(problem) or "the server broke off before the answer was complete")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ChatError(f"no server answers at {self._url}; `pagoda serve` starts one") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise ChatError(f"{self._url} is not a URL: {error}") from error
        except httpx.TimeoutException as error:
            raise ChatError("the server took too long to answer") from error
        except httpx.HTTPError as error:
            raise ChatError(f"the connection broke: {error or type(error).__name__}") from error


def _check(response: httpx.Response) -> None:
    """Raise `ChatError` with the server's own words."""
    if response.is_success:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.text.strip()[:200] or response.reason_phrase
    raise ChatError(f"the server answers {response.status_code}: {printable(message)}")


def _events(response: httpx.Response) -> Iterator[StreamEvent]:
    """Up to the one that says that nothing follows."""
    splitter = EventSplitter()
    try:
        for data in response.iter_bytes():
            for event in map(parse_event, splitter.feed(data)):
                if event.is_done:
                    return
                yield event
            if len(splitter.rest) > _MAX_EVENT_BYTES:
                raise ChatError(f"the server sends an event of more than {_MAX_EVENT_BYTES} bytes")
        with suppress(NotAnEventError):  # cut in the middle
            yield parse_event(splitter.rest)
    except NotAnEventError as error:
        raise ChatError(f"the server sends what is {printable(str(error))}") from error


def _note(event: StreamEvent, answer: Answer) -> None:
    """Note what an event says about the answer."""
    if event.error is not None:
        raise ChatError(printable(event.error))
    if (usage := event.usage) is not None:
        answer.num_prompt_tokens = usage.num_prompt_tokens
        answer.num_output_tokens = usage.num_output_tokens
        answer.num_cached_tokens = usage.num_cached_tokens
    answer.finish_reason = event.finish_reason or answer.finish_reason
