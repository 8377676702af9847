"""``laminar operator``: one operator as a long-running consumer."""

from __future__ import annotations

from typing import Annotated

import typer

from laminar.pipeline.commands.arguments import ConfigPath, Overrides
from laminar.pipeline.process import run_instance

__all__ = ["command"]


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the operator in the run file.", show_default=False)
    ],
    config: ConfigPath,
    overrides: Overrides = None,
    instance: Annotated[int, typer.Option(min=0, help="Which of its replicas this process is.")] = 0,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of /healthz and /metrics, instead of monitor.port; 0: none.")
    ] = None,
) -> None:
    """Run one operator until SIGTERM or the end of the run; then it drains.

    Exit codes: 0 finished, 75 trying again may help, 76 another process took its identity, 78 wrong configuration, 70
    trying again cannot help.
    """
    raise typer.Exit(run_instance(config, name, instance, arguments=overrides or (), monitor_port=port))
