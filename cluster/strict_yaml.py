"""YAML files that people write: two values for one key are a mistake, not a choice."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from pagoda.worker.errors import ConfigError


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(str(key), "given twice")
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> Any:
    """What the file holds. Raises `ConfigError` naming the file, and the key that is given twice."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except ConfigError as error:
        raise ConfigError(str(path), str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:  # dates that are none raise ValueError
        raise ConfigError(str(path), f"not valid YAML: {' '.join(str(error).split())}") from error
