"""`pagoda lookup`: which worker holds how much of a text, and where."""

import click

from pagoda.cluster.commands.directory_http import ask


@click.command()
@click.argument("text")
@click.option("--url", default="http://127.0.0.1:8000", help="The server.")
@click.option("--chat", "is_chat", is_flag=True, help="The text is a user's first message, not a bare prompt.")
def lookup(text: str, url: str, is_chat: bool) -> None:
    """Show which workers hold TEXT in their KV caches, and in which tier."""
    body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    answer = ask(url, "/directory/lookup", body)
    click.echo(f"{answer['num_tokens']} tokens")
    for worker in sorted(answer["workers"], key=lambda each: -each["num_tokens"]):
        about = f", about to hold {worker['num_predicted_tokens']} more" if worker["num_predicted_tokens"] else ""
        lower = worker["num_tokens"] - worker["num_device_tokens"]
        where = f" ({worker['num_device_tokens']} on the device, {lower} below)" if lower else ""
        click.echo(f"{worker['worker_id'][:8]}  holds {worker['num_tokens']}{where}{about}")
