"""``laminar operator``: one operator as a long-running consumer."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from laminar.pipeline.commands.arguments import ConfigPath, Overrides
from laminar.pipeline.process import run_instance
from laminar.schemas.errors import ConfigError

__all__ = ["command", "split_instance"]


_INSTANCE = re.compile(r"^(?P<name>[^-]+)-(?P<index>\d+)$")


def split_instance(name: str, index: int | None) -> tuple[str, int]:
    """Operator and replica of ``rollout-1``, or of ``rollout`` and ``index``. Raises ConfigError if they disagree."""
    found = _INSTANCE.match(name)
    if found is None:
        return name, index or 0
    if index is not None and index != int(found["index"]):
        raise ConfigError(f"--instance {index}: {name} is replica {found['index']} already (valid: one of the two)")
    return found["name"], int(found["index"])


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the operator in the run file; NAME-1 is its replica 1.", show_default=False
        ),
    ],
    config: ConfigPath,
    overrides: Overrides = None,
    instance: Annotated[
        int | None, typer.Option(min=0, help="Which of its replicas this process is (default 0).", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of /readyz, /metrics, ..., instead of monitor.port; 0: none.")
    ] = None,
) -> None:
    """Run one operator until SIGTERM or the end of the run; then it drains.

    A second SIGTERM leaves at once. Exit codes: 0 finished; 75 trying again may help; 76 another process took its
    identity; 78 wrong configuration; 70 trying again cannot help.
    """
    name, index = split_instance(name, instance)
    raise typer.Exit(run_instance(config, name, index, arguments=overrides or (), monitor_port=port))
