"""The Avro schemas: every version of every record ever written, from ``schemas/avro/``.

A file is ``{record}.v{version}.avsc`` and the version is also the namespace of the type, so a reference such as
``laminar.v1.Prompt`` says which version of a nested record is meant, and no two versions share a fingerprint (the
canonical form drops defaults and docs, but keeps names).

To change a record: add a file with the next version and leave the old one. The highest version in the package is
what is written; the others are read and resolved to it, so a new field needs a default.

>>> PACKAGED.current("ScoredTrajectory").version
3
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from laminar.schemas.errors import ConfigError

__all__ = ["PACKAGED", "AvroSchema", "SchemaSet"]

_FOLDER = Path(__file__).parent / "avro"
_FILE = re.compile(r"(?P<stem>[a-z_]+)\.v(?P<version>\d+)\.avsc")
_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroSchema:
    """One version of one record, ready for reading and writing."""

    name: str
    """The record's class name."""
    version: int
    fingerprint: bytes
    """CRC-64-AVRO of the canonical form, 8 bytes little-endian, as it stands in the framing."""
    whole: Mapping[str, Any]
    """Self-contained: each nested type is spelled out at its first use."""
    parsed: Any
    """``whole`` in fastavro's own form."""

    @property
    def full_name(self) -> str:
        """``laminar.v1.Prompt``."""
        return f"laminar.v{self.version}.{self.name}"


class SchemaSet:
    """The schemas of a folder; those of further folders are only read, never written."""

    def __init__(self, *further: Path) -> None:
        self._further = further
        self._loaded: dict[str, AvroSchema] = {}

    @cached_property
    def _texts(self) -> dict[str, dict[str, Any]]:
        """Full name (``laminar.v1.Prompt``) -> schema as in its file."""
        found: dict[str, dict[str, Any]] = {}
        for folder in (_FOLDER, *self._further):
            for path in sorted(folder.glob("*.avsc")):
                text = json.loads(path.read_text(encoding="utf-8"))
                match = _FILE.fullmatch(path.name)
                wanted = f"laminar.v{match['version']}" if match else "laminar.v{version}"
                if not match or text["namespace"] != wanted or _snake(text["name"]) != match["stem"]:
                    raise ConfigError(
                        f"{path}: holds {text['namespace']}.{text['name']}; a file is named after its record in snake "
                        f"case, then .v and the version, and its namespace is laminar.v and the version"
                    )
                found.setdefault(f"{text['namespace']}.{text['name']}", text)
        return found

    @cached_property
    def _packaged_versions(self) -> dict[str, int]:
        """Class name -> the version that this installation writes."""
        newest: dict[str, int] = {}
        for path in _FOLDER.glob("*.avsc"):
            match = _FILE.fullmatch(path.name)
            if match:
                newest[match["stem"]] = max(newest.get(match["stem"], 0), int(match["version"]))
        return newest

    @cached_property
    def _by_fingerprint(self) -> dict[bytes, AvroSchema]:
        schemas = (self._load(full_name) for full_name in self._texts)
        return {schema.fingerprint: schema for schema in schemas}

    def current(self, name: str) -> AvroSchema:
        """The version of a record that is written and that readers resolve to. Raises KeyError."""
        return self._load(f"laminar.v{self._packaged_versions[_snake(name)]}.{name}")

    def by_fingerprint(self, fingerprint: bytes) -> AvroSchema | None:
        """The schema that a frame names; None if no file has it."""
        return self._by_fingerprint.get(fingerprint)

    def names(self) -> tuple[str, ...]:
        """Full names of all schemas, sorted."""
        return tuple(sorted(self._texts))

    def _load(self, full_name: str) -> AvroSchema:
        if full_name in self._loaded:
            return self._loaded[full_name]
        from fastavro import parse_schema
        from fastavro.schema import fingerprint, to_parsing_canonical_form

        whole = self._inlined(full_name, set())
        digest = fingerprint(to_parsing_canonical_form(whole), "CRC-64-AVRO")
        loaded = AvroSchema(
            name=full_name.rpartition(".")[2],
            version=int(full_name.split(".")[1].removeprefix("v")),
            fingerprint=bytes.fromhex(digest),
            whole=whole,
            parsed=parse_schema(whole),
        )
        self._loaded[full_name] = loaded
        return loaded

    def _inlined(self, node: Any, seen: set[str]) -> Any:
        """The schema with each named type spelled out at its first use."""
        if isinstance(node, str):
            if node in _PRIMITIVES or node in seen:
                return node
            if node not in self._texts:
                raise ConfigError(f"schema {node}: no such file in {_FOLDER}")
            seen.add(node)
            text = self._texts[node]
            return {
                **text,
                "fields": [{**field, "type": self._inlined(field["type"], seen)} for field in text["fields"]],
            }
        if isinstance(node, list):
            return [self._inlined(branch, seen) for branch in node]
        return {key: self._inlined(value, seen) if key in ("items", "values") else value for key, value in node.items()}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


PACKAGED = SchemaSet()
"""The schemas of this installation. Nothing is read before the first use."""
