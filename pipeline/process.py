"""The process of one operator: exit code, log, and its bond to the supervisor that started it.

``python -m laminar.pipeline.process NAME INDEX CONFIG [BEGAN_AT SUPERVISOR_PID [MONITOR_PORT]]`` is what
``laminar run`` starts (``laminar operator`` is the same for people). A supervised process dies with its supervisor,
however that dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from laminar.operators.relay.token import ENVIRONMENT as RELAY_TOKEN
from laminar.pipeline.config.explaining import secret_environment
from laminar.pipeline.config.loading import load_config
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.exit_code import DO_NOT_RETRY, FINISHED, RETRYABLE, exit_code_of
from laminar.pipeline.full_disk import full_disk
from laminar.pipeline.json_log import LogLabels, set_up
from laminar.pipeline.runner import run_operator
from laminar.schemas.errors import ConfigError, LaminarError
from laminar.streams.secret import FromEnvironment, FromFile

__all__ = ["die_with", "main", "run_instance"]

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def die_with(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent is gone; exit if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(FINISHED)


def given_secrets() -> list[str]:
    """Secrets that stand in the environment of every process of a run."""
    token = os.environ.get(RELAY_TOKEN, "").strip()
    return [token] if token else []


def _secrets_of(config: RunConfig) -> list[str]:
    """Secrets of the configuration: those that stand in it, and those that it refers to."""
    found = [str(json.loads(text)) for text in secret_environment(config).values()]
    for reference in _references(config):
        with suppress(ConfigError):  # whoever needs it says what is wrong with it
            found.append(reference.read(""))
    return found


def _references(value: object) -> Iterator[FromEnvironment | FromFile]:
    if isinstance(value, FromEnvironment | FromFile):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _references(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _references(item)


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
    instance = f"{name}-{index}"
    set_up(LogLabels(operator=name, instance=instance), "info", given_secrets())
    faulthandler.enable()
    try:
        config = load_config(config_path, arguments, only=name).config
        labels = LogLabels(run=config.name, operator=name, instance=instance)
        set_up(labels, config.runner.log_level, [*given_secrets(), *_secrets_of(config)])
        if name not in config.operators:
            raise ConfigError(f"no operator '{name}' in {config_path} (valid: {', '.join(config.operators)})")
        reason = run_operator(config, name, index, began_at=began_at, monitor_port=monitor_port)
    except LaminarError as error:
        for line in str(error).splitlines():
            logger.error("%s: %s", type(error).__name__, line)
        code = exit_code_of(error)
        full = full_disk(error, [config_path.parent]) if code in DO_NOT_RETRY else None
        if full is not None:
            logger.error("Unavailable: %s; %s", full, " ".join(str(error).split()))
            return RETRYABLE
        return code
    logger.info("done: %s", reason)
    gc.freeze()  # everything is closed: spare the interpreter's last collection, seconds with torch in it
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
