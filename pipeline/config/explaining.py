"""Every value of a configuration with where it came from, and the resolved file for the run's folder.

Secrets (by name, such as ``sasl.password``, or by type) are never written: processes get them through their
environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretBytes, SecretStr

from laminar.pipeline.config.loading import Loaded
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.config.schema import is_secret
from laminar.pipeline.config.source import ENV_PREFIX, KeyPath, dotted

__all__ = ["Setting", "explain", "resolved_yaml", "secret_environment"]

HIDDEN = json.dumps("(secret)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value."""

    path: KeyPath
    value: str
    """As JSON; a secret is hidden."""
    source: str
    """``default``, ``file:line``, a variable's name, or ``argument NAME``."""

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


def _leaves(node: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(node, Mapping) and (node or not at):
        for key, value in node.items():
            yield from _leaves(value, (*at, str(key)))
    else:
        yield at, node


def _hide(path: KeyPath, value: Any) -> bool:
    return isinstance(value, SecretStr | SecretBytes) or (is_secret(path) and value not in (None, ""))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value


def explain(loaded: Loaded) -> list[Setting]:
    """Every value, defaults included, in the order of the models."""
    out: list[Setting] = []
    for path, value in _leaves(loaded.config.model_dump()):
        shown = HIDDEN if _hide(path, value) else json.dumps(str(value) if isinstance(value, Path) else _plain(value))
        source = "default"
        for length in range(len(path), 0, -1):
            if path[:length] in loaded.sources:
                if length == len(path) or not _has_given_children(loaded, path[:length]):
                    source = loaded.sources[path[:length]]
                break
        out.append(Setting(path=path, value=shown, source=source))
    return out


def _has_given_children(loaded: Loaded, path: KeyPath) -> bool:
    return any(len(known) > len(path) and known[: len(path)] == path for known in loaded.sources)


def resolved_yaml(config: RunConfig) -> str:
    """The configuration as a run file by itself: absolute paths, every default written out, no secret."""
    tree: dict[str, Any] = {}
    for path, value in _leaves(config.model_dump()):
        if _hide(path, value):
            continue
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = _plain(value)
    head = f"# The resolved configuration of run {config.name}, as its processes read it.\n"
    return head + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def secret_environment(config: RunConfig) -> dict[str, str]:
    """The secrets that the resolved file leaves out, as variables that the loader reads."""
    out: dict[str, str] = {}
    for path, value in _leaves(config.model_dump()):
        if _hide(path, value):
            secret = value.get_secret_value() if isinstance(value, SecretStr | SecretBytes) else value
            text = secret.decode() if isinstance(secret, bytes) else str(secret)
            out[ENV_PREFIX + "__".join(path).upper()] = json.dumps(text)
    return out
