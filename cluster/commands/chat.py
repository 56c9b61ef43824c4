"""`pagoda chat`: a conversation in the terminal with a model that is served somewhere."""

import contextlib
import io
import math
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from pagoda.cluster.chat_client import Answer, ChatClient, ChatError, Message, printable
from pagoda.cluster.commands.credentials import credential_options, trust
from pagoda.worker.errors import ConfigError

_HELP = "/clear starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", help="The server.")
@click.option("--model", help="Which of its models.  [default: the first it names]")
@click.option("--system", help="System prompt.  [default: the model's own, if its template has one]")
@click.option("--temperature", type=float, help="0 always takes the most probable token.  [default: the server's]")
@click.option("--top-p", type=float, help="Only the most probable tokens that together reach this.")
@click.option("--top-k", type=int, help="Only this many most probable tokens.")
@click.option("--min-p", type=float, help="Only tokens at least this probable compared to the most probable.")
@click.option("--max-tokens", type=int, help="Longest answer.  [default: what the context leaves]")
@click.option("--seed", type=int, help="Same seed, same answers.")
@click.option("--stop", multiple=True, help="Ends an answer, and is not part of it. May be given several times.")
@credential_options
def chat(
    url: str, model: str | None, system: str | None, api_key: str | None, ca_cert: Path | None, **sampling: Any
) -> None:
    """Talk to a served model.

    Each line is a message; behind each answer stands how long its first text took (TTFT), tokens per second, and how
    much of the prompt was found in the server's cache. With input from a pipe, answers go to standard output and
    everything else to standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal cannot show must not end the conversation
            stream.reconfigure(errors="replace")
    given = {name: value for name in _SAMPLING if (value := sampling[name]) not in (None, ())}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, f"must be finite, got {value}")
    for name, texts in (("system", (system or "",)), ("stop", sampling["stop"])):
        if not all(map(_is_text, texts)):
            raise ConfigError(name, "is not text")
    with closing(ChatClient(url, api_key=api_key, verify=trust(ca_cert))) as client:
        served = client.models()
        if not served:
            raise ChatError(f"{url} serves no model")
        if model is not None and model not in served:
            raise ChatError(f"{model} is not served at {url}; served: {', '.join(served)}")
        name = model or served[0]
        click.echo(printable(f"{name} at {url}. {_HELP}."), err=True)
        _talk(client, name, system, given)


def _talk(client: ChatClient, model: str, system: str | None, sampling: dict[str, Any]) -> None:
    """Until the input ends. An error ends it too where nobody is there to read it."""
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    is_interactive = sys.stdin.isatty()
    for line in _lines(is_interactive=is_interactive):
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/clear":
                messages = list(beginning)
                click.echo("(a new conversation)", err=True)
                continue
            case "/help":
                click.echo(_HELP, err=True)
                continue
            case command if is_interactive and re.fullmatch("/[a-z]+", command):
                click.echo(f"there is no {command}; {_HELP}", err=True)
                continue
        if not _is_text(line):
            if not is_interactive:
                raise ChatError("the input is not text")
            click.echo("Error: that is not text", err=True)
            continue
        messages.append({"role": "user", "content": line})
        answer = Answer()
        try:
            _show(client, model, messages, sampling, answer)
        except ChatError as error:
            if not is_interactive:
                raise
            click.echo(f"Error: {error}", err=True)
        if answer.text:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            messages.pop()  # roles must alternate


def _show(client: ChatClient, model: str, messages: list[Message], sampling: dict[str, Any], answer: Answer) -> None:
    """Print an answer as it comes, and what it took. Ctrl-C ends it there."""
    is_stopped = False
    try:
        with closing(client.ask(model, messages, sampling, answer)) as pieces:
            for piece in pieces:
                click.echo(printable(piece) if sys.stdout.isatty() else piece, nl=False)
    except KeyboardInterrupt:
        is_stopped = True
    finally:
        if answer.text and not answer.text.endswith("\n"):
            click.echo()
    click.secho(f"[{_summary(answer, is_stopped=is_stopped)}]", err=True, dim=True)


def _summary(answer: Answer, *, is_stopped: bool) -> str:
    parts = []
    if answer.ttft_s is not None:
        parts.append(f"TTFT {answer.ttft_s * 1e3:.0f} ms")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.num_output_tokens is not None:
        parts.append(f"{answer.num_output_tokens} tokens")
    if answer.num_prompt_tokens is not None:
        parts.append(f"{answer.num_cached_tokens or 0} of {answer.num_prompt_tokens} prompt tokens cached")
    if is_stopped:
        parts.append("stopped")
    elif answer.finish_reason == "length":
        parts.append("cut: out of tokens")
    return " · ".join(parts) or "no text"


def _lines(*, is_interactive: bool) -> Iterator[str]:
    """The user's lines. Ctrl-C at the prompt drops the line, Ctrl-D ends."""
    if not is_interactive:
        try:
            for line in sys.stdin:
                yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ChatError(f"the input is not text: {error}") from error
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` history and editing)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            click.echo(f"\n({_HELP})", err=True)
        except UnicodeDecodeError:
            click.echo("Error: that is not text", err=True)
        except EOFError:
            click.echo(err=True)
            return


def _is_text(line: str) -> bool:
    """Bytes that were none are surrogates here."""
    return not any("\ud800" <= character <= "\udfff" for character in line)
