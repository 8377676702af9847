"""``laminar audit``: the ledger, once or live."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn, Protocol

import typer

from laminar.pipeline.auditing import Look, audit_run, follow_run
from laminar.pipeline.commands.arguments import AsJson, ConfigPath, Overrides, opened_log
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger, Violation
from laminar.streams.open import open_codec

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

__all__ = ["command", "line", "text"]

_MOST_VIOLATIONS = 20


def command(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends; Ctrl-C prints the ledger so far.")
    ] = False,
    period: Annotated[float, typer.Option(min=0.1, help="With --follow: seconds between two looks.")] = 5.0,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for reading the topics; with --follow for one look.")
    ] = 600.0,
) -> None:
    """Print what became of every admitted sample, from the topics alone. Exit code 1 if the ledger does not balance.

    With --follow a line every period (a table on a terminal, JSON lines with --json), and each violation at once.
    """
    with opened_log(config, overrides) as (run, log):
        codec = open_codec(run.log)
        if not follow:
            ledger: Ledger | None = audit_run(log, codec, run, Deadline.after(timeout, "audit"))
        else:
            ledger = _followed(follow_run(log, codec, run, period_s=period, timeout_s=timeout), as_json=as_json)
    if ledger is None:
        return
    if not (follow and as_json):
        typer.echo(json.dumps(ledger.as_json(), indent=2) if as_json else text(ledger))
    if not ledger.balanced:
        raise typer.Exit(1)


def _followed(looks: Iterator[Look], *, as_json: bool) -> Ledger | None:
    """Show each look; the last ledger that there was, also after Ctrl-C."""
    ledger: Ledger | None = None
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - a signal handler
        nonlocal interrupted
        interrupted = True  # where Python swallows the exception, in a destructor say, the next look ends it
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with _screen(as_json) as screen:
            for look in looks:
                ledger = look.ledger
                screen.show(look)
                if interrupted:
                    break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        typer.echo("stopped; the ledger so far:", err=True)
    return ledger


class _Screen(Protocol):
    def show(self, look: Look) -> None:
        """Take the next look."""


@contextmanager
def _screen(as_json: bool) -> Iterator[_Screen]:
    if as_json:
        yield _JsonLines()
    elif not sys.stdout.isatty():
        yield _Lines()
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield _Table(live)


class _JsonLines:
    def show(self, look: Look) -> None:
        facts = {"at_ms": int(time.time() * 1000), "final": look.final, **look.ledger.as_json()}
        typer.echo(json.dumps({**facts, "new_violations": [one.as_json() for one in look.new]}))


class _Lines:
    def show(self, look: Look) -> None:
        for violation in look.new:
            typer.echo(str(violation))
        typer.echo(f"{time.strftime('%H:%M:%S')} {line(look.ledger)}")


class _Table:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, look: Look) -> None:
        for violation in look.new:
            self._live.console.print(str(violation), style="red", markup=False, highlight=False)
        self._live.update(_picture(look.ledger), refresh=True)


def _picture(ledger: Ledger) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, n in _rows(ledger):
        table.add_row(name, f"{n:>10,}")
    table.add_row("", "-" * 10)
    table.add_row("together", f"{ledger.admitted:>10,}")
    state = "[green]balanced[/]" if ledger.balanced else f"[red]{len(ledger.violations)} violations[/]"
    return Panel(table, title=f"{ledger.run_id} · {ledger.steps} steps · {state}", title_align="left", expand=False)


def line(ledger: Ledger) -> str:
    """The ledger as one line."""
    parts = [f"step {ledger.steps}", f"admitted {ledger.admitted}"]
    parts += [f"{name} {n}" for name, n in _rows(ledger)]
    parts.append("balanced" if ledger.balanced else f"VIOLATIONS {len(ledger.violations)}")
    return "  ".join(parts)


def _rows(ledger: Ledger) -> list[tuple[str, int]]:
    rows: list[tuple[str, int]] = [("trained", ledger.trained)]
    rows += [(f"dropped: {reason}", n) for reason, n in sorted(ledger.dropped.items())]
    rows += [("dead letters", ledger.dead)]
    return rows + [(f"in flight: {stage}", n) for stage, n in ledger.in_flight.items()]


def text(ledger: Ledger) -> str:
    """The ledger for a person."""
    rows = _rows(ledger)
    lines = [f"run {ledger.run_id}: {ledger.steps} steps, {ledger.admitted} samples admitted", ""]
    lines += [f"  {name:<28}{n:>10}" for name, n in rows]
    lines += [f"  {'':<28}{'-' * 10}", f"  {'together':<28}{sum(n for _, n in rows):>10}", ""]
    lines.append(
        f"late results ignored: {ledger.late}; steps voided by a resume: {ledger.void_steps};"
        f" undecodable records: {ledger.undecodable}; versions in a trajectory: {_versions(ledger)}"
    )
    if ledger.retried:
        lines.append(f"dead letters given back to the dataflow: {ledger.retried}")
    lines += [f"skipped by configuration: {one}" for one in ledger.skipped]
    if ledger.skipped:
        lines.append("members of which only skipped records told cannot be known")
    if ledger.incomplete:
        lines.append(f"the beginning of {', '.join(ledger.incomplete)} is gone (retention): losses cannot be seen")
    if ledger.unknown:
        lines.append(f"members of which the prompt is gone, and which are not counted above: {ledger.unknown}")
    lines += [_with_places(violation) for violation in ledger.violations[:_MOST_VIOLATIONS]]
    if len(ledger.violations) > _MOST_VIOLATIONS:
        lines.append(f"... and {len(ledger.violations) - _MOST_VIOLATIONS} more violations (--json has all)")
    lines.append("balanced" if ledger.balanced else f"NOT BALANCED: {len(ledger.violations)} violations")
    return "\n".join(lines)


def _versions(ledger: Ledger) -> str:
    mean, most = ledger.mean_versions_per_trajectory, ledger.max_versions_per_trajectory
    return str(most) if most <= 1 else f"{mean:.2f} in the mean, {most} at most"


def _with_places(violation: Violation) -> str:
    others = violation.places[1:]
    return f"{violation}; see also {', '.join(others)}" if others else str(violation)
