"""``laminar operator``: one operator as a long-running consumer."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from laminar.pipeline.commands.arguments import ConfigPath, Overrides
from laminar.pipeline.process import run_instance
from laminar.schemas.errors import ConfigError

__all__ = ["command"]


_INSTANCE = re.compile(r"^(?P<name>[^-]+)-(?P<index>\d+)$")


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
    found = _INSTANCE.match(name)
    if found is not None:
        index = int(found["index"])
        if instance is not None and instance != index:
            raise ConfigError(f"--instance {instance}: {name} is replica {index} already (valid: one of the two)")
        name, instance = found["name"], index
    raise typer.Exit(run_instance(config, name, instance or 0, arguments=overrides or (), monitor_port=port))
