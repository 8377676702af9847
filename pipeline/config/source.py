"""Reads settings from a YAML file, the environment and arguments into one tree that knows where each value came from.

Later sources win: file, then ``LAMINAR__A__B=value``, then ``a.b=value``. Values of the last two are YAML too, so
``null``, numbers and lists mean what they mean in the file. Names in the environment are case-insensitive.

>>> tree = Tree()
>>> tree.override("steps=5")
>>> tree.data, tree.sources[("steps",)]
({'steps': 5}, 'argument steps')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from laminar.schemas.errors import ConfigError

__all__ = ["ENV_PREFIX", "FLAT", "KeyPath", "Tree", "dotted"]

ENV_PREFIX = "LAMINAR__"

KeyPath = tuple[str, ...]
"""The keys on the way to a value."""

FLAT: tuple[KeyPath, ...] = (
    ("log", "client"),
    ("log", "partitions"),
    ("log", "registry", "client"),
)
"""Mappings whose keys contain dots themselves."""


def dotted(path: KeyPath) -> str:
    """A path as it is written in arguments and messages."""
    return ".".join(path)


class Tree:
    """Settings as nested plain values, with a source for every one."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.sources: dict[KeyPath, str] = {}
        self.errors: list[str] = []
        """What could not be read at all; one line each."""

    def read_file(self, path: Path) -> None:
        """Take a YAML file. Raises ConfigError when there is no such file."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{path}: cannot read the configuration: {reason}") from None
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                self.errors.append(f"{path}:1: the file is empty")
            elif not isinstance(node, yaml.MappingNode):
                self.errors.append(f"{path}:{node.start_mark.line + 1}: the file must be a mapping of settings")
            else:
                self.data = self._mapping(loader, node, (), str(path))
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            self.errors.append(f"{path}:{line}: not valid YAML: {error.problem}")
        except yaml.YAMLError as error:
            self.errors.append(f"{path}: not valid YAML: {str(error).splitlines()[0]}")
        finally:
            loader.dispose()

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, at: KeyPath, file: str) -> dict[str, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            name = key_node.value
            if name in seen and name != "<<":
                line = key_node.start_mark.line + 1
                self.errors.append(f"{file}:{line}: {dotted((*at, str(name)))}: stands here a second time")
            seen.add(name)
        loader.flatten_mapping(node)
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            path = (*at, key)
            self.sources[path] = f"{file}:{key_node.start_mark.line + 1}"
            if isinstance(value_node, yaml.MappingNode):
                out[key] = self._mapping(loader, value_node, path, file)
            else:
                out[key] = loader.construct_object(value_node, deep=True)
        return out

    def read_environment(self, environ: Mapping[str, str], on_kind: Callable[[KeyPath], None] | None = None) -> None:
        """Take every ``LAMINAR__A__B`` variable."""
        names = sorted(name for name in environ if name.startswith(ENV_PREFIX))
        for name in sorted(names, key=lambda n: not n.lower().endswith("__kind")):
            path = tuple(part.lower() for part in name[len(ENV_PREFIX) :].split("__"))
            self._set(path, environ[name], name, on_kind)

    def read_arguments(self, arguments: list[str], on_kind: Callable[[KeyPath], None] | None = None) -> None:
        """Take every ``a.b=value``, kinds first."""
        for argument in sorted(arguments, key=lambda a: not a.split("=")[0].endswith(".kind")):
            self.override(argument, on_kind)

    def override(self, argument: str, on_kind: Callable[[KeyPath], None] | None = None) -> None:
        """Take one ``a.b=value``."""
        name, equals, text = argument.partition("=")
        if not equals:
            self.errors.append(f"argument {argument}: not of the form key=value")
            return
        self._set(tuple(name.strip().split(".")), text, f"argument {name.strip()}", on_kind)

    def _set(self, path: KeyPath, text: str, source: str, on_kind: Callable[[KeyPath], None] | None) -> None:
        for flat in FLAT:
            if path[: len(flat)] == flat and len(path) > len(flat) + 1:
                path = (*flat, dotted(path[len(flat) :]))
        if not all(path):
            self.errors.append(f"{source}: a part of the name is empty")
            return
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        node = self.data
        for depth, key in enumerate(path[:-1], start=1):
            child = node.get(key)
            if not isinstance(child, dict):
                child = node[key] = {}
                self._forget(path[:depth])
                self.sources[path[:depth]] = source
            node = child
        self._forget(path)
        node[path[-1]] = value
        self.sources[path] = source
        self._mark(value, path, source)
        if path[-1] == "kind" and on_kind is not None:
            on_kind(path[:-1])

    def _forget(self, path: KeyPath) -> None:
        for known in [known for known in self.sources if known[: len(path)] == path]:
            del self.sources[known]

    def _mark(self, value: Any, path: KeyPath, source: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self.sources[(*path, str(key))] = source
                self._mark(item, (*path, str(key)), source)

    def drop(self, path: KeyPath) -> None:
        """Remove a value."""
        node = self.data
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        self._forget(path)

    def source_of(self, path: KeyPath) -> str | None:
        """Where the value, or the nearest mapping around it, came from."""
        for length in range(len(path), 0, -1):
            found = self.sources.get(path[:length])
            if found is not None:
                return found
        return None
