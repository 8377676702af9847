"""``laminar run``: all operators of a run file on this machine."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import typer

from laminar.pipeline.auditing import audit_run
from laminar.pipeline.commands.arguments import ConfigPath, Overrides
from laminar.pipeline.config.loading import load_config
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.exit_code import FINISHED
from laminar.pipeline.opening import (
    opening_report,
    refuse_foreign_log,
    refuse_incomplete,
    refuse_other_group_size,
    refuse_other_log,
    refuse_renamed,
)
from laminar.pipeline.placement import gpus_here, placed
from laminar.pipeline.run_folder import RunFolder
from laminar.pipeline.screens import open_screen
from laminar.pipeline.summary import Summary, closing_report, count_totals, write_summary
from laminar.pipeline.supervisor import Outcome, Supervisor
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.open import open_codec, open_log
from laminar.streams.topics import topic_specs

__all__ = ["command"]

_COUNT_TIMEOUT_S = 600.0


def command(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run all operators of a run file on this machine; on a folder that a run has used before, go on.

    Relative paths in the file are relative to the current directory.

    Ctrl-C or SIGTERM drains; the third signal kills. Exit codes: 0 finished, 2 wrong configuration, 70 an operator
    cannot go on, 75 no progress or too many failures, 128 + N stopped by signal N.
    """
    raise typer.Exit(run(config, overrides or []))


def _summarise(config: RunConfig, log: Log, outcome: Outcome) -> Summary:
    codec = open_codec(config.log)
    deadline = Deadline.after(_COUNT_TIMEOUT_S, "count what the run came to")
    return Summary.of(
        outcome.fold,
        count_totals(log, codec, deadline),
        audit_run(log, codec, config, deadline),
        wall_s=outcome.wall_s,
        restarts=outcome.restarts,
        exit_reason=outcome.reason,
    )


def run(path: Path, overrides: list[str]) -> int:
    """The exit code. Raises LaminarError before anything was started."""
    config = load_config(path, overrides).config
    refuse_incomplete(config)
    placed(config, gpus_here())
    with RunFolder(config) as folder, ExitStack() as stack:
        refuse_other_log(config, folder)
        refuse_renamed(config, folder)
        refuse_other_group_size(config, folder)
        open_codec(config.log).prepare()
        log = stack.enter_context(closing(open_log(config.log, run_id=config.name)))
        log.create_topics(topic_specs(config.log.partitions))
        refuse_foreign_log(config, log, resumed=folder.resumed)
        folder.write_config(config)
        screen = open_screen(config)
        for line in opening_report(config, folder):
            logging.getLogger("laminar").info("%s", line)
        outcome = Supervisor(config, folder, log, screen).run()
        logging.getLogger("laminar").info("reading the topics for the ledger")
        summary = _summarise(config, log, outcome)
        write_summary(folder.summary_path, summary)
        shown = closing_report(
            summary,
            run_dir=config.run_dir,
            config=str(path),
            finished=outcome.exit_code == FINISHED,
            overrides=overrides,
        )
        typer.echo(shown)
    sys.stdout.flush()
    if outcome.exit_code != FINISHED:
        sys.stderr.write(f"error: {outcome.reason}\n")
    return outcome.exit_code
