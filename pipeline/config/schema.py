"""Which settings class stands at which place of the tree, and what names it knows.

>>> [model.__name__ for model in models_at({"log": {"kind": "kafka"}}, ("log",))]
['KafkaLogConfig']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from laminar.operators.registry import KINDS, config_class
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.config.source import KeyPath
from laminar.streams.secret import is_secret_name

__all__ = ["did_you_mean", "is_secret", "models_at", "operator_kind"]


def is_secret(path: KeyPath) -> bool:
    """Whether the value at this path must never be printed."""
    return bool(path) and is_secret_name(path[-1])


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The closest valid name, or all of them, as the end of a message."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid: {', '.join(names)}" if names else "nothing is valid here"


def operator_kind(name: str, settings: Mapping[str, Any]) -> str | None:
    """The kind of an operator; one that is named like a kind is of that kind."""
    kind = settings.get("kind", name if name in KINDS else None)
    return kind if isinstance(kind, str) else None


def _flatten(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flatten(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [leaf for arg in get_args(annotation) for leaf in _flatten(arg)]
    return [annotation]


def _kinds_of(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _models(annotations: list[Any], node: Any) -> list[type[BaseModel]]:
    models = [a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)]
    kind = node.get("kind") if isinstance(node, dict) else None
    if kind is None and len(models) > 1:
        defaults = [m for m in models if "kind" in m.model_fields and not m.model_fields["kind"].is_required()]
        return defaults[:1] or models
    return [m for m in models if kind in _kinds_of(m)] or models


def _step(annotations: list[Any], node: Any, key: str) -> list[Any]:
    out: list[Any] = []
    for model in _models(annotations, node):
        field = model.model_fields.get(key)
        if field is not None:
            out += _flatten(field.annotation)
    for annotation in annotations:
        if get_origin(annotation) in (dict, Mapping):
            out += _flatten(get_args(annotation)[1])
        elif get_origin(annotation) in (list, tuple):
            out += _flatten(get_args(annotation)[0])
    return out


def models_at(data: Mapping[str, Any], path: KeyPath) -> list[type[BaseModel]]:
    """The settings classes that the value at this path may be of; none where it is a plain value or unknown."""
    annotations: list[Any] = [RunConfig]
    node: Any = data
    for depth, key in enumerate(path):
        annotations = _step(annotations, node, key)
        node = node.get(key) if isinstance(node, Mapping) else None
        if depth == 1 and path[0] == "operators":
            kind = operator_kind(key, node) if isinstance(node, Mapping) else None
            annotations = [config_class(kind)] if kind is not None and kind in KINDS else []
    return _models(annotations, node)
