"""The `pagoda` command. Only adapts: reads options, calls the packages, shows progress and errors."""

import logging
import sys
from typing import Any

import click

from pagoda import __version__
from pagoda.cluster.commands.chat import chat
from pagoda.cluster.commands.doctor import doctor
from pagoda.cluster.commands.generate import generate
from pagoda.cluster.commands.model import model
from pagoda.cluster.commands.serve import serve
from pagoda.worker.errors import PagodaError


class _Group(click.Group):
    """Shows our own errors as one line; whatever else goes wrong keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PagodaError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="pagoda")
@click.option("--verbose", "-v", is_flag=True, help="Log what is going on to standard error.")
def main(verbose: bool) -> None:
    """Serve language models from a paged, prefix-shared KV cache."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


main.add_command(serve)
main.add_command(chat)
main.add_command(doctor)
main.add_command(generate)
main.add_command(model)
