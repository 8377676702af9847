"""What must hold between settings, and between settings and the disk, before anything starts.

>>> problems(config)                                                                     # doctest: +SKIP
[(('operators',), "no trainer: ...")]
"""

from __future__ import annotations

import os
from pathlib import Path

from laminar.operators.repack.config import RepackConfig
from laminar.operators.rollout.config import RolloutConfig, VllmEngineConfig
from laminar.operators.trainer.config import TrainerConfig
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.config.schema import did_you_mean
from laminar.pipeline.config.source import KeyPath
from laminar.streams.open import SqliteLogConfig
from laminar.streams.topics import TOPICS

__all__ = ["model_problems", "problems"]

_SINGLE = ("prompts", "trainer")
"""Kinds of which exactly one process may run: they own their position themselves."""

_NEED_MODEL = ("prompts", "rollout", "trainer")
"""Kinds that read the model's folder, be it for its tokenizer."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def problems(config: RunConfig, *, check_files: bool = True, only: str | None = None) -> list[tuple[KeyPath, str]]:
    """Everything that is wrong, as (path, message). ``only``: the operator that will run here; None: all of them."""
    found = _operators(config) + _gpus(config) + _leases(config) + _partitions(config)
    if check_files:
        kind = str(getattr(config.operators.get(only or ""), "kind", ""))
        if only is None or kind in _NEED_MODEL:
            found += model_problems(config.model.path)
        found += _folders(config)
    return found


def _operators(config: RunConfig) -> list[tuple[KeyPath, str]]:
    found: list[tuple[KeyPath, str]] = []
    by_kind: dict[str, str] = {}
    for name, operator in config.operators.items():
        kind = str(getattr(operator, "kind", name))
        at = ("operators", name)
        if kind in by_kind and kind != "relay":
            found.append((at, f"a second operator of kind '{kind}' beside '{by_kind[kind]}': use replicas instead"))
        by_kind.setdefault(kind, name)
        if operator.replicas < 0 or (kind in _SINGLE and operator.replicas > 1):
            limit = "at most 1" if kind in _SINGLE else "at least 0"
            found.append(((*at, "replicas"), f"must be {limit} for kind '{kind}', not {operator.replicas}"))
    return found


def _gpus(config: RunConfig) -> list[tuple[KeyPath, str]]:
    """What is known to use GPUs must be given as many as it uses, where the file says how many anybody gets."""
    if all(operator.gpus is None for operator in config.operators.values()):
        return []
    found: list[tuple[KeyPath, str]] = []
    for name, operator in config.operators.items():
        at = ("operators", name, "gpus")
        if isinstance(operator, TrainerConfig) and (operator.gpus or 0) > 1:
            found.append((at, f"must be at most 1, not {operator.gpus}: the trainer is one process on one device"))
        if not isinstance(operator, RolloutConfig) or not isinstance(operator.engine, VllmEngineConfig):
            continue
        if operator.gpus == 0:
            continue  # vLLM on the CPU, said expressly
        size = operator.engine.args.get("tensor_parallel_size", 1)
        if isinstance(size, int) and size != (operator.gpus or 0):
            found.append((at, f"must be engine.args.tensor_parallel_size = {size}, not {operator.gpus}"))
    return found


def _leases(config: RunConfig) -> list[tuple[KeyPath, str]]:
    """A rollout must be able to load weights within its lease, and repack may call it dead only after that."""
    rollouts = [(name, one) for name, one in config.operators.items() if isinstance(one, RolloutConfig)]
    repacks = [(name, one) for name, one in config.operators.items() if isinstance(one, RepackConfig)]
    found: list[tuple[KeyPath, str]] = []
    for name, rollout in rollouts:
        at, lease_s = ("operators", name), rollout.lease_s
        if rollout.load_timeout_s >= lease_s:
            text = f"must be below operators.{name}.lease_s = {lease_s:g}, not {rollout.load_timeout_s:g}"
            found.append(((*at, "load_timeout_s"), text))
        for other, repack in repacks:
            if lease_s > repack.dead_after_s:
                text = f"must be at most operators.{other}.dead_after_s = {repack.dead_after_s:g}, not {lease_s:g}"
                found.append(((*at, "lease_s"), text))
    return found


def _partitions(config: RunConfig) -> list[tuple[KeyPath, str]]:
    return [
        (("log", "partitions", topic), f"no such topic ({did_you_mean(topic, TOPICS)})")
        for topic in config.log.partitions
        if topic not in TOPICS
    ]


def model_problems(path: Path) -> list[tuple[KeyPath, str]]:
    """What is wrong with a model folder."""
    at = ("model", "path")
    if not path.is_dir():
        example = "" if path.parent.is_dir() else "; `laminar example` writes one"
        return [(at, f"no such model folder: {path}{example}")]
    if not (path / "config.json").is_file():
        return [(at, f"{path} is not a Hugging Face model folder: config.json is missing")]
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return [(at, f"{path} has no tokenizer (one of {', '.join(_TOKENIZER_FILES)})")]
    if not any(path.glob("*.safetensors")):
        return [(at, f"{path} has no weights (*.safetensors)")]
    return []


def _folders(config: RunConfig) -> list[tuple[KeyPath, str]]:
    wanted: list[tuple[KeyPath, Path]] = [(("run_dir",), config.run_dir)]
    if isinstance(config.log, SqliteLogConfig) and config.log.path is not None:
        wanted.append((("log", "path"), config.log.path))
    found: list[tuple[KeyPath, str]] = []
    for at, folder in wanted:
        above = folder
        while not above.exists() and above != above.parent:
            above = above.parent
        if not above.is_dir():
            found.append((at, f"{above} is a file, not a folder"))
        elif not os.access(above, os.W_OK | os.X_OK):
            found.append((at, f"{above} is not writable"))
    return found
