"""Options from a YAML file: its keys are the options' names, the command line wins over it."""

import difflib
from pathlib import Path
from typing import Any

import click
import yaml

from pagoda.cluster.strict_yaml import read_yaml
from pagoda.worker.errors import ConfigError

_KINDS: tuple[tuple[type[Any], tuple[type, ...], str], ...] = (
    (click.types.BoolParamType, (bool,), "true or false"),
    (click.types.IntParamType, (int,), "a whole number"),
    (click.types.FloatParamType, (int, float), "a number"),
)
_NOT_IN_FILES = ("config", "print-config", "help")


def key_of(option: click.Parameter) -> str:
    """What an option is called in a file: its first long name without the dashes."""
    return next((name for name in option.opts if name.startswith("--")), option.opts[0]).lstrip("-")


def file_options(command: click.Command) -> dict[str, click.Parameter]:
    """The options of a command that a file may set, by key."""
    return {key_of(option): option for option in command.params if key_of(option) not in _NOT_IN_FILES}


def read_config_file(path: Path, command: click.Command) -> dict[str, Any]:
    """Values of a YAML file as a `default_map` of the command.

    Raises `ConfigError` naming the file, and the key that is unknown, given twice or of a wrong type.
    """
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), "must be a mapping of options to values")
    options = file_options(command)
    values = {}
    for key, value in content.items():
        if (option := options.get(key)) is None:
            raise ConfigError(str(path), f"{key}: unknown option{_suggestion(str(key), options)}")
        if value is not None:  # nothing asks for the default
            _check_type(path, key, option, value)
            is_path = isinstance(option.type, click.Path)
            values[option.name or key] = str(Path(value).expanduser()) if is_path else value
    return values


def dump_config(context: click.Context) -> str:
    """The options of the call that is running, as a file that says the same."""
    values = {}
    for key, option in file_options(context.command).items():
        value = context.params[option.name or key]
        values[key] = str(value) if isinstance(value, Path) else value
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def _check_type(path: Path, key: str, option: click.Parameter, value: object) -> None:
    """No coercion: "8000" is not 8000, 8000.5 neither, and true is not 1."""
    types, expected = next(((t, e) for kind, t, e in _KINDS if isinstance(option.type, kind)), ((str,), "text"))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(str(path), f"{key}: must be {expected}, got {value!r}")
    if isinstance(option.type, click.Choice) and value not in option.type.choices:
        raise ConfigError(str(path), f"{key}: must be one of {', '.join(option.type.choices)}, got {value!r}")


def _suggestion(key: str, known: dict[str, click.Parameter]) -> str:
    close = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def config_options(command: Any) -> Any:
    """Adds `--config` and `--print-config`."""

    def read(context: click.Context, _: click.Parameter, path: Path | None) -> None:
        if path is not None:
            context.default_map = read_config_file(path, context.command)

    command = click.option(
        "--print-config", is_flag=True, help="Print all options as such a file and leave.", expose_value=True
    )(command)
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=read,
        help="YAML file of options, such as `kv-cache-gib: 4`; the command line wins over it.",
    )(command)
