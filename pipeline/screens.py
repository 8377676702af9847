"""Chooses where a run is shown: a live picture on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys

from rich.console import Console

from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.json_log import LogLabels, set_up
from laminar.pipeline.live import LineScreen, LiveScreen, Screen

__all__ = ["open_screen"]


class _AboveThePicture(logging.Handler):
    """Log lines scroll above the live picture."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        style = "yellow" if record.levelno >= logging.WARNING else None
        self._console.print(self.format(record), style=style, markup=False, highlight=False)


def open_screen(config: RunConfig) -> Screen:
    """Set up this process's log and the screen for it."""
    if not sys.stdout.isatty():
        set_up(LogLabels(run=config.name, operator="run"), config.runner.log_level)
        return LineScreen(config.supervisor.report_period_s)
    console = Console()
    root = logging.getLogger()
    root.handlers[:] = [_AboveThePicture(console)]
    root.setLevel(config.runner.log_level.upper())
    return LiveScreen(console)
