"""The `pagoda` command. Only adapts: reads options, calls the packages, shows progress and errors.

Each command is imported when it is asked for: most bring torch along, which takes seconds.
"""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from pagoda import __version__
from pagoda.worker.errors import ConfigError, PagodaError

_COMMANDS = ("serve", "chat", "bench", "directory", "doctor", "generate", "lookup", "model", "tenants", "top")
"""Each is the function of its name in the module of its name."""
_IN_OTHER_UNITS = {"memory_bytes": "kv_cache_gib", "max_body_bytes": "max_body_mib"}
"""Settings whose options have another name."""


class _Group(click.Group):
    """Shows our own errors as one line; whatever else goes wrong keeps its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (they are always the same)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        with _ended_by_interrupts():
            module = import_module(f"pagoda.cluster.commands.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            setting = _option_of(error.setting, command) if command else error.setting
            raise click.ClickException(f"{setting}: {error.message}") from error
        except PagodaError as error:
            raise click.ClickException(str(error)) from error


def _option_of(setting: str, command: click.Command) -> str:
    """The option that a setting comes from; the setting itself if it comes from none."""
    setting = _IN_OTHER_UNITS.get(setting, setting)
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    options = (option for each in commands for option in each.params if option.name == setting)
    return next((max(option.opts, key=len) for option in options), setting)


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process without a word: an exception in the middle of an import may become any other."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


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
