"""The folder of a run: who may use it, and what stands where.

``config.yaml`` (resolved), ``log/`` (the embedded log), ``logs/INSTANCE.log``, ``summary.json``; operators add their
own (checkpoints). One supervisor at a time holds the lock; the kernel releases it when that process is gone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from laminar.pipeline.config.explaining import resolved_yaml
from laminar.pipeline.config.models import RunConfig
from laminar.schemas.errors import ConfigError

__all__ = ["RunFolder"]


class RunFolder:
    """A run's folder, locked while open."""

    def __init__(self, config: RunConfig) -> None:
        """Make the folder and take the lock. Raises ConfigError when another process holds it."""
        self.path = config.run_dir.absolute()
        self.config_path = self.path / "config.yaml"
        self.summary_path = self.path / "summary.json"
        self.resumed = self.config_path.exists()
        """Whether a run was started in this folder before."""
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"run_dir: cannot write to {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode().strip()
            os.close(self._lock)
            raise ConfigError(f"run_dir: {self.path} is in use by another `laminar run` (process {owner})") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration: what the processes read."""
        beside = self.config_path.with_suffix(".tmp")
        beside.write_text(resolved_yaml(config), encoding="utf-8")
        beside.replace(self.config_path)

    def log_path(self, instance: str) -> Path:
        """Where a process's log goes."""
        return self.path / "logs" / f"{instance}.log"

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
