"""What several commands share: the types of their arguments, and how a run's log is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from laminar.pipeline.config.loading import load_config
from laminar.pipeline.config.models import RunConfig
from laminar.schemas.errors import ConfigError
from laminar.streams.log import Log
from laminar.streams.open import SqliteLogConfig, open_log

__all__ = ["AsJson", "ConfigPath", "Overrides", "opened_log"]

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Run file, or the folder of a run.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def opened_log(path: Path, overrides: Sequence[str] | None) -> Iterator[tuple[RunConfig, Log]]:
    """The run file and its log, which must exist."""
    config = load_config(path, overrides or (), check_files=False).config
    if isinstance(config.log, SqliteLogConfig) and config.log.path is not None and not config.log.path.exists():
        raise ConfigError(f"log.path: no log at {config.log.path} (`laminar run` makes one)")
    with closing(open_log(config.log, run_id=config.name)) as log:
        yield config, log
