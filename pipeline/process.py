"""The process of one operator: exit code, log, and its bond to the supervisor that started it.

``python -m laminar.pipeline.process NAME INDEX CONFIG [BEGAN_AT SUPERVISOR_PID [MONITOR_PORT]]`` is what
``laminar run`` starts (``laminar operator`` is the same for people). A supervised process dies with its supervisor,
however that dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from laminar.pipeline.config.loading import load_config
from laminar.pipeline.exit_code import FINISHED, exit_code_of
from laminar.pipeline.json_log import set_up
from laminar.pipeline.runner import run_operator
from laminar.schemas.errors import ConfigError, LaminarError

__all__ = ["die_with", "main", "run_instance"]

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def die_with(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent is gone; exit if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(FINISHED)


def run_instance(
    config_path: Path,
    name: str,
    index: int,
    *,
    arguments: Sequence[str] = (),
    began_at: int | None = None,
    monitor_port: int | None = None,
) -> int:
    """Run one operator; the exit code. Errors are logged as one line each."""
    set_up(f"{name}-{index}", "info")
    faulthandler.enable()
    try:
        config = load_config(config_path, arguments, only=name).config
        logging.getLogger().setLevel(config.runner.log_level.upper())
        if name not in config.operators:
            raise ConfigError(f"no operator '{name}' in {config_path} (valid: {', '.join(config.operators)})")
        reason = run_operator(config, name, index, began_at=began_at, monitor_port=monitor_port)
    except LaminarError as error:
        for line in str(error).splitlines():
            logger.error("%s: %s", type(error).__name__, line)
        return exit_code_of(error)
    logger.info("done: %s", reason)
    return FINISHED


def main(argv: Sequence[str]) -> int:
    """See the module's docstring."""
    name, index, config = argv[0], int(argv[1]), Path(argv[2])
    began_at = int(argv[3]) if len(argv) > 3 else None
    if len(argv) > 4:
        die_with(int(argv[4]))
    port = int(argv[5]) if len(argv) > 5 else None
    return run_instance(config, name, index, began_at=began_at, monitor_port=port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
