"""What ``laminar run`` checks and says before it starts anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from laminar.pipeline.config.explaining import resolved_yaml
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.placement import gpus_here, placed
from laminar.pipeline.run_folder import RunFolder
from laminar.schemas.errors import ConfigError, DecodeError, TopicMismatch
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.open import KafkaLogConfig, MemoryLogConfig, SqliteLogConfig, open_codec
from laminar.streams.reading import partitions_of, read_topic

__all__ = [
    "opening_report",
    "refuse_foreign_log",
    "refuse_incomplete",
    "refuse_other_group_size",
    "refuse_other_log",
    "refuse_renamed",
]

_NEEDED = ("prompts", "rollout", "reward", "relay", "trainer")
"""Kinds without which no step is ever made. ``replicas: 0`` says that it runs elsewhere."""
_READ_TIMEOUT_S = 60.0


def refuse_incomplete(config: RunConfig) -> None:
    """Raise ConfigError, one line each, for what a run cannot do without."""
    kinds = {getattr(operator, "kind", "") for operator in config.operators.values()}
    problems = [
        f"operators: no operator of kind '{kind}', so no step could ever be made (replicas: 0 says it runs elsewhere)"
        for kind in _NEEDED
        if kind not in kinds
    ]
    if isinstance(config.log, MemoryLogConfig):
        problems.append("log.kind: 'memory' lives in one process, and a run has several (valid: sqlite, kafka)")
    if problems:
        raise ConfigError("\n".join(problems))


def _where(config: RunConfig) -> str:
    log = config.log
    if isinstance(log, SqliteLogConfig):
        return str(log.path)
    return log.bootstrap if isinstance(log, KafkaLogConfig) else "memory"


def refuse_foreign_log(config: RunConfig, log: Log, *, resumed: bool) -> None:
    """Raise TopicMismatch when the log holds another run, or this folder is new and the log is not."""
    codec = open_codec(config.log)
    for record in read_topic(log, "training.steps", Deadline.after(_READ_TIMEOUT_S, "read training.steps")):
        try:
            owner = str(getattr(codec.decode(record.value or b""), "run_id", ""))
        except DecodeError:
            continue
        if owner != config.name:
            raise TopicMismatch(
                f"the log at {_where(config)} is of run '{owner}', not '{config.name}' (use another one)"
            )
        break
    if resumed:
        return
    reader = log.reader()
    for topic in ("prompts", "training.steps"):
        found = sum(
            reader.bounds(partition).end - reader.bounds(partition).start for partition in partitions_of(log, topic)
        )
        if found:
            raise TopicMismatch(
                f"the log at {_where(config)} holds {found} records on {topic} already, but {config.run_dir} is a new"
                f" folder (use the folder that belongs to this log, or another log)"
            )
    reader.close()


def refuse_other_log(config: RunConfig, folder: RunFolder) -> None:
    """Raise TopicMismatch when this folder's run began on another log: its checkpoints point into that one."""
    before = _settings_before(folder).get("log")
    if not isinstance(before, dict):
        return
    now = yaml.safe_load(resolved_yaml(config))["log"]
    for key in ("kind", "path"):
        if before.get(key) != now.get(key):
            raise TopicMismatch(
                f"run_dir: the run in {config.run_dir} began with log.{key}={before.get(key)}, not {now.get(key)}"
                f" (use another run_dir)"
            )


def refuse_renamed(config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError when an operator of this folder's run had another name: its place in the log goes by it.

    Relays have no place in the log, and there may be several.
    """
    known = _settings_before(folder).get("operators")
    if not isinstance(known, dict):
        return
    names = {str(one.get("kind", name)): name for name, one in known.items() if isinstance(one, dict)}
    problems = []
    for name, operator in config.operators.items():
        kind = str(getattr(operator, "kind", name))
        before = names.get(kind, name)
        if before != name and kind != "relay":
            problems.append(
                f"operators.{name}: in {config.run_dir} the operator of kind '{kind}' is called '{before}', not"
                f" '{name}': renamed, it would do everything again (use the old name, or another run_dir)"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_other_group_size(config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError when this folder's run began with another group size.

    Groups of the old size are under way, and one of which only dead members are known yet does not tell its size.
    """
    before = _settings_before(folder).get("group_size", config.group_size)
    if before != config.group_size:
        raise ConfigError(
            f"group_size: the run in {config.run_dir} began with {before}, not {config.group_size}, and groups of that"
            f" size are under way (groups_per_step may change; or use another run_dir)"
        )


def _settings_before(folder: RunFolder) -> Mapping[str, Any]:
    """The resolved configuration with which this folder's run began or went on last; empty for a new folder."""
    if not folder.resumed:
        return {}
    try:
        before = yaml.safe_load(folder.config_path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}  # not ours to judge: it is written anew
    return before if isinstance(before, dict) else {}


def opening_report(config: RunConfig, folder: RunFolder) -> list[str]:
    """What is about to run, and every number that paces it (C10)."""
    processes = ", ".join(f"{name} x {operator.replicas}" for name, operator in config.operators.items())
    going_on = "goes on in" if folder.resumed else "in"
    return [
        f"run {config.name} {going_on} {folder.path}, log {config.log.kind} at {_where(config)}",
        f"processes: {processes}",
        *_gpus(config),
        _pacing(config),
    ]


def _gpus(config: RunConfig) -> list[str]:
    found = [(name, index, gpus) for (name, index), gpus in placed(config, gpus_here()).items() if gpus]
    return ["GPUs: " + ", ".join(f"{name}-{index}: {' '.join(gpus)}" for name, index, gpus in found)] if found else []


def _pacing(config: RunConfig) -> str:
    prompts = next((o for o in config.operators.values() if getattr(o, "kind", "") == "prompts"), None)
    rollouts = next((o for o in config.operators.values() if getattr(o, "kind", "") == "rollout"), None)
    configured = getattr(prompts, "max_outstanding_groups", None)
    groups = configured or 3 * config.groups_per_step
    if config.max_staleness is not None:
        groups = min(groups, (config.max_staleness + 1) * config.groups_per_step)
    slots = getattr(getattr(rollouts, "engine", None), "max_running", None)
    replicas = rollouts.replicas if rollouts is not None else 0
    room = f", engines sample {slots * replicas} at a time" if isinstance(slots, int) else ""
    return (
        f"in flight: at most {groups} groups = {groups * config.group_size} trajectories{room}"
        f" (groups_per_step {config.groups_per_step}, group_size {config.group_size},"
        f" max_staleness {'none' if config.max_staleness is None else config.max_staleness},"
        f" max_outstanding_groups {configured or 'default: 3 x groups_per_step'})"
    )
