"""The run file's settings. Frozen; unknown keys are errors; a field's docstring is its help.

Relative paths are relative to the directory in which the command is run, as for every other command line tool; the
resolved file in the run's folder has absolute ones.

>>> run.operators["rollout"].replicas                                                   # doctest: +SKIP
2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, StringConstraints, model_validator

from laminar.operators.operator import ModelConfig, OperatorConfig, RunInfo
from laminar.streams.open import LogConfig, SqliteLogConfig
from laminar.streams.topics import topic_specs

__all__ = ["MonitorConfig", "OperatorName", "RunConfig", "RunnerConfig", "SupervisorConfig"]

OperatorName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
"""No hyphen: an instance is ``{name}-{index}``."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SupervisorConfig(_Settings):
    """How ``laminar run`` looks after its processes."""

    no_progress_timeout_s: float = Field(default=180.0, gt=0)
    """No record on any data topic for this long ends the run with the topic, its lag and the last heartbeat."""
    drain_timeout_s: float = Field(default=20.0, gt=0)
    """How long all processes together may take to end after the run's end or a SIGTERM; then they are killed."""
    restart_backoff_s: float = Field(default=0.5, gt=0)
    """Wait before the first restart of a process; doubles with each failure in a row."""
    restart_backoff_max_s: float = Field(default=10.0, gt=0)
    """Longest wait before a restart."""
    restart_stable_s: float = Field(default=30.0, gt=0)
    """A process that lived this long starts its back-off anew."""
    max_restarts_in_a_row: int = Field(default=20, ge=0)
    """More failures in a row than this end the run."""
    threads_per_process: int | None = Field(default=None, ge=1)
    """OMP_NUM_THREADS of each process, unless it is set already; null = cores / processes, at least 1."""
    report_period_s: float = Field(default=5.0, gt=0)
    """Time between two log lines when the output is not a terminal."""


class RunnerConfig(_Settings):
    """The loop around one operator."""

    idle_min_s: float = Field(default=0.001, gt=0)
    """Wait after a step that found nothing to do; doubles with each such step in a row."""
    idle_max_s: float = Field(default=0.02, gt=0)
    """Longest wait between two steps."""
    follow_period_s: float = Field(default=0.2, gt=0)
    """How often the end of the run is looked for."""
    slow_step_s: float = Field(default=5.0, gt=0)
    """A step that takes longer is logged, also while it lasts, with the line of code that it stands at."""
    drain_timeout_s: float = Field(default=15.0, gt=0)
    """How long an operator may take to finish what is in hand after a SIGTERM or the run's end; then it leaves, and its
    next owner does the rest again. Under ``laminar run`` at most ``supervisor.drain_timeout_s``."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    ended_grace_s: float = Field(default=60.0, gt=0)
    """A run found already ended at start: how long to wait for a trainer to resume it before leaving."""


class MonitorConfig(_Settings):
    """``/livez``, ``/readyz``, ``/healthz`` and ``/metrics`` of each process."""

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` in a container. There is no authentication: keep it inside the cluster."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: none. Under ``laminar run`` each further process takes the next port."""
    stalled_after_s: float = Field(default=60.0, gt=0)
    """``/livez`` answers 503 when the operator has not finished a step for this long."""
    stuck_after_s: float = Field(default=300.0, gt=0)
    """``/readyz`` answers 503 when records wait and the operator has got nowhere with them for this long."""
    standby_after_s: float = Field(default=30.0, gt=0)
    """A process that got no partition for this long counts as a standby, and is ready while its group gets on."""
    unanswered_after_s: float = Field(default=30.0, gt=0)
    """``/readyz`` answers 503 when the log has not answered for this long."""
    probe_period_s: float = Field(default=10.0, gt=0)
    """How often the log is asked for lag, committed offsets and the oldest unprocessed record."""


class RunConfig(_Settings):
    """A run: what is trained, on which log, by which operators."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """The run's id: it stands in consumer groups, transactional ids and manifests."""
    run_dir: Path = Path()
    """Folder for the log, checkpoints, logs and the summary; by default ``runs/NAME``."""
    seed: int = 0
    steps: int = Field(ge=1)
    """Optimizer steps after which the run ends."""
    groups_per_step: int = Field(ge=1)
    """Groups that one optimizer step consumes."""
    group_size: int = Field(ge=1)
    """Samples of one prompt."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest (trainer version - oldest version of a trained trajectory); null = no bound."""
    model: ModelConfig
    log: LogConfig = SqliteLogConfig()
    operators: dict[OperatorName, SerializeAsAny[OperatorConfig]]
    """By name; ``kind`` says what each is."""
    supervisor: SupervisorConfig = SupervisorConfig()
    runner: RunnerConfig = RunnerConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_run_dir(cls, data: object) -> object:
        if isinstance(data, dict) and not data.get("run_dir") and isinstance(data.get("name"), str):
            return {**data, "run_dir": Path("runs") / data["name"]}
        return data

    @model_validator(mode="after")
    def _fill_log_path(self) -> Self:
        if isinstance(self.log, SqliteLogConfig) and self.log.path is None:
            object.__setattr__(self, "log", self.log.model_copy(update={"path": self.run_dir / "log"}))
        return self

    def info(self) -> RunInfo:
        """What every operator of the run agrees on."""
        engines = [getattr(operator, "engine", None) for operator in self.operators.values()]
        lengths = [n for engine in engines if (n := getattr(engine, "max_model_len", None)) is not None]
        return RunInfo(
            run_id=self.name,
            run_dir=self.run_dir,
            steps=self.steps,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            seed=self.seed,
            model=self.model,
            partitions={spec.name: spec.partitions for spec in topic_specs(self.log.partitions)},
            max_model_len=min(lengths, default=None),
        )

    def instances(self) -> list[tuple[str, int]]:
        """Every process that the run consists of, as (operator name, index), in the order of the file."""
        return [(name, index) for name, operator in self.operators.items() for index in range(operator.replicas)]
