"""From a run file, the environment and arguments to a RunConfig, or to all that is wrong with them at once.

>>> load_config(Path("configs/quickstart.yaml"), ["steps=5"]).config.steps                 # doctest: +SKIP
5
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from laminar.operators.operator import OperatorConfig
from laminar.operators.registry import KINDS, config_class
from laminar.pipeline.config.checks import model_problems, problems
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.config.schema import did_you_mean, is_secret, models_at, operator_kind
from laminar.pipeline.config.source import ENV_PREFIX, FLAT, KeyPath, Tree, dotted
from laminar.schemas.errors import ConfigError
from laminar.streams.open import LogConfig, SqliteLogConfig

__all__ = ["Loaded", "load_config"]

RESOLVED = "config.yaml"
"""Name of the resolved file in a run's folder."""

_CLIENTS = tuple(at for at in FLAT if at[-1] == "client")
"""Settings of client libraries as they are; the secrets are among them."""
_REFERENCE = "{env: NAME} or {file: PATH}"

_SETTINGS_OF_LOG: TypeAdapter[Any] = TypeAdapter(LogConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A valid configuration and where its values came from."""

    config: RunConfig
    sources: Mapping[KeyPath, str]
    """Of every value that was given; the others are defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    path: KeyPath
    message: str


def load_config(
    path: Path,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    check_files: bool = True,
    only: str | None = None,
) -> Loaded:
    """Read, merge and check. A folder stands for the resolved file in it.

    ``check_files=False`` leaves out whether the model's folder exists, for commands that only read the log; ``only``
    names the operator that will run here: one that needs no model needs no model folder. Raises ConfigError with one
    line for each thing that is wrong.
    """
    tree = Tree()
    tree.read_file(path / RESOLVED if path.is_dir() else path)

    def drop_other_kind(at: KeyPath) -> None:
        _drop_what_the_new_kind_does_not_know(tree, at)

    tree.read_environment(os.environ if environ is None else environ, drop_other_kind)
    tree.read_arguments(list(arguments), drop_other_kind)
    config, found = _validate(tree.data)
    if config is not None:
        more = problems(config, check_files=check_files, only=only)
    else:
        more = _model_problems(tree.data) if check_files else []
    found += [_Problem(path=at, message=text) for at, text in more]
    found += _open_secrets(tree)
    if tree.errors or found or config is None:
        lines = tree.errors + sorted((_line(tree, path, problem) for problem in found), key=_by_line)
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return Loaded(config=config, sources=tree.sources)


def _open_secrets(tree: Tree) -> list[_Problem]:
    """Secrets whose value stands in a file, or on a command line, which every process of the machine can read."""
    found = []
    for at in _CLIENTS:
        node: Any = tree.data
        for key in at:
            node = node.get(key) if isinstance(node, dict) else None
        for name, value in (node or {}).items() if isinstance(node, dict) else ():
            path = (*at, name)
            given = value not in (None, "") and not isinstance(value, dict)
            if given and is_secret(path) and not (tree.source_of(path) or "").startswith(ENV_PREFIX):
                text = f"a secret is given by where it stands: {_REFERENCE}, not by its value"
                found.append(_Problem(path=path, message=text))
    return found


def _model_problems(data: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    model = data.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return model_problems(Path(path)) if isinstance(path, str) else []


def _by_line(text: str) -> tuple[str, int, str]:
    """In the order of the file."""
    file, _, rest = text.partition(":")
    line = rest.partition(":")[0]
    return (file, int(line), "") if line.isdigit() else (file, 0, text)


def _drop_what_the_new_kind_does_not_know(tree: Tree, at: KeyPath) -> None:
    """``log.kind=kafka`` alone must switch: what only the file's kind knows goes with it."""
    models = models_at(tree.data, at)
    node: Any = tree.data
    for key in at:
        node = node[key]
    if models:
        known = {name for model in models for name in model.model_fields}
        for key in [key for key in node if key not in known]:
            tree.drop((*at, key))


def _line(tree: Tree, file: Path, problem: _Problem) -> str:
    source = tree.source_of(problem.path) or str(file)
    named = not problem.path or source == f"argument {dotted(problem.path)}"
    return f"{source}: {problem.message}" if named else f"{source}: {dotted(problem.path)}: {problem.message}"


def _validate(data: dict[str, Any]) -> tuple[RunConfig | None, list[_Problem]]:
    """The config (without what is broken, so that more can be checked) and the problems."""
    found: list[_Problem] = []
    whole = dict(data)
    whole["operators"] = _operators(data, found)
    if "log" in data:
        given = data["log"]
        if isinstance(given, dict):
            given = {"kind": "sqlite", **given}
        try:
            whole["log"] = _SETTINGS_OF_LOG.validate_python(given)
        except ValidationError as error:
            found += _problems_of(error, data, ("log",))
            whole["log"] = SqliteLogConfig()
    try:
        return RunConfig.model_validate(whole), found
    except ValidationError as error:
        return None, found + _problems_of(error, data, ())


def _operators(data: dict[str, Any], found: list[_Problem]) -> dict[str, OperatorConfig]:
    given = data.get("operators")
    out: dict[str, OperatorConfig] = {}
    if not isinstance(given, dict):
        text = "missing" if "operators" not in data else "must be a mapping of operators by name"
        found.append(_Problem(path=("operators",), message=f"{text} (kinds: {', '.join(sorted(KINDS))})"))
        return out
    for name, settings in given.items():
        at = ("operators", str(name))
        if not isinstance(settings, dict | None):
            found.append(_Problem(path=at, message="must be a mapping of settings"))
            continue
        settings = settings or {}
        kind = operator_kind(str(name), settings)
        if kind is None:
            found.append(_Problem(path=(*at, "kind"), message=f"missing (valid: {', '.join(sorted(KINDS))})"))
        elif kind not in KINDS:
            valid = ", ".join(sorted(KINDS))
            hint = did_you_mean(kind, sorted(KINDS))
            more = hint if hint.startswith("valid") else f"{hint} valid: {valid}"
            found.append(_Problem(path=(*at, "kind"), message=f"unknown operator kind '{kind}' ({more})"))
        else:
            try:
                out[str(name)] = config_class(kind).model_validate({**settings, "kind": kind})
            except ValidationError as error:
                found += _problems_of(error, data, at)
    return out


def _problems_of(error: ValidationError, data: dict[str, Any], at: KeyPath) -> list[_Problem]:
    found = [_problem_of(item, data, at) for item in error.errors(include_url=False)]
    return [_of_client(problem) for problem in found]


def _of_client(problem: _Problem) -> _Problem:
    """What a client takes as its setting may be of several types: one line for all of them."""
    for at in _CLIENTS:
        if problem.path[: len(at)] == at and len(problem.path) > len(at):
            text = f"must be a text, a number, true or false; or, for a secret, {_REFERENCE}"
            return _Problem(path=problem.path[: len(at) + 1], message=text)
    return problem


def _problem_of(item: Any, data: dict[str, Any], at: KeyPath) -> _Problem:
    """One of pydantic's errors in our words, under the path as the user wrote it (without union tags)."""
    node: Any = data
    for key in at:
        node = node.get(key) if isinstance(node, dict) else None
    path = at
    loc = item["loc"]
    for position, step in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(node, dict) and (step in node or (last and item["type"] == "missing")):
            path, node = (*path, str(step)), node.get(step)
        elif isinstance(node, list) and isinstance(step, int) and step < len(node):
            path, node = (*path, str(step)), node[step]
        elif last and item["type"] == "missing":
            path = (*path, str(step))
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, "kind")
    return _Problem(path=path, message=_message(item, data, path))


def _message(item: Any, data: dict[str, Any], path: KeyPath) -> str:
    kind, text = item["type"], str(item["msg"])
    if kind == "extra_forbidden":
        valid = [name for model in models_at(data, path[:-1]) for name in model.model_fields]
        return f"unknown key ({did_you_mean(path[-1], valid)})"
    if kind == "missing":
        return "missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        expected = str(item["ctx"].get("expected_tags", "")).replace("'", "").split(", ")
        tag = str(item["ctx"].get("tag", ""))
        return (
            f"unknown kind '{tag}' ({did_you_mean(tag, expected)})"
            if tag
            else f"missing (valid: {', '.join(expected)})"
        )
    text = text.removeprefix("Value error, ").removeprefix("Input ")
    given = item.get("input")
    if is_secret(path) or isinstance(given, dict | list | BaseModel):
        return text
    if kind == "literal_error" and isinstance(given, str):
        return f"{text}, not {given!r} ({did_you_mean(given, _choices(data, path))})"
    if kind == "string_pattern_mismatch":
        if path == ("name",) or (path[:1] == ("operators",) and len(path) == 2):
            return f"{given!r} is not a valid name (letters, digits, '_'; operators lowercase, starting with a letter)"
        return f"{given!r} is not valid (it must match {item['ctx']['pattern']})"
    return f"{text}, not {given!r}"


def _choices(data: dict[str, Any], path: KeyPath) -> list[str]:
    out: list[str] = []
    for model in models_at(data, path[:-1]):
        field = model.model_fields.get(path[-1])
        stack = [field.annotation] if field is not None else []
        while stack:
            annotation = stack.pop()
            stack += [a for a in get_args(annotation) if get_origin(a) is not None]
            out += [a for a in get_args(annotation) if isinstance(a, str)]
    return out
