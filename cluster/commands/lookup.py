"""`pagoda lookup`: which worker holds how much of a text, and where."""

from pathlib import Path
from typing import Any

import click

from pagoda.cluster.commands.credentials import credential_options
from pagoda.cluster.commands.directory_http import ask


@click.command()
@click.argument("text")
@click.option("--url", default="http://127.0.0.1:8000", help="The server.")
@click.option("--chat", "is_chat", is_flag=True, help="The text is a user's first message, not a bare prompt.")
@click.option("--cache-salt", help="As in requests.  [default: none]")
@credential_options
def lookup(
    text: str, url: str, is_chat: bool, cache_salt: str | None, api_key: str | None, ca_cert: Path | None
) -> None:
    """Show which workers hold TEXT in their KV caches, and in which tier."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    answer = ask(url, "/directory/lookup", body, api_key=api_key, ca_cert=ca_cert)
    click.echo(f"{answer['num_tokens']} tokens")
    for worker in sorted(answer["workers"], key=lambda each: -each["num_tokens"]):
        about = f", about to hold {worker['num_predicted_tokens']} more" if worker["num_predicted_tokens"] else ""
        lower = worker["num_tokens"] - worker["num_device_tokens"]
        where = f" ({worker['num_device_tokens']} on the device, {lower} below)" if lower else ""
        click.echo(f"{worker['worker_id'][:8]}  holds {worker['num_tokens']}{where}{about}")
