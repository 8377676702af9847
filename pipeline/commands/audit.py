"""``laminar audit``: the ledger."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from laminar.pipeline.auditing import audit_run
from laminar.pipeline.commands.arguments import AsJson, ConfigPath, Overrides, opened_log
from laminar.streams.deadline import Deadline
from laminar.streams.ledger import Ledger
from laminar.streams.open import open_codec

__all__ = ["command"]

_MOST_VIOLATIONS = 20


def command(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for reading the topics.")] = 600.0,
) -> None:
    """Print what became of every admitted sample, from the topics alone. Exit code 1 if the ledger does not balance."""
    with opened_log(config, overrides) as (run, log):
        ledger = audit_run(log, open_codec(run.log), run, Deadline.after(timeout, "audit"))
    typer.echo(json.dumps(ledger.as_json(), indent=2) if as_json else _text(ledger))
    if not ledger.balanced:
        raise typer.Exit(1)


def _text(ledger: Ledger) -> str:
    rows: list[tuple[str, int]] = [("trained", ledger.trained)]
    rows += [(f"dropped: {reason}", n) for reason, n in sorted(ledger.dropped.items())]
    rows += [("dead letters", ledger.dead)]
    rows += [(f"in flight: {stage}", n) for stage, n in ledger.in_flight.items()]
    lines = [f"run {ledger.run_id}: {ledger.steps} steps, {ledger.admitted} samples admitted", ""]
    lines += [f"  {name:<28}{n:>10}" for name, n in rows]
    lines += [f"  {'':<28}{'-' * 10}", f"  {'together':<28}{sum(n for _, n in rows):>10}", ""]
    lines.append(
        f"late results ignored: {ledger.late}; steps voided by a resume: {ledger.void_steps};"
        f" undecodable records: {ledger.undecodable}; versions in a trajectory: {ledger.max_versions_per_trajectory}"
    )
    if ledger.incomplete:
        lines.append(f"the beginning of {', '.join(ledger.incomplete)} is gone (retention): losses cannot be seen")
    lines += [str(violation) for violation in ledger.violations[:_MOST_VIOLATIONS]]
    if len(ledger.violations) > _MOST_VIOLATIONS:
        lines.append(f"... and {len(ledger.violations) - _MOST_VIOLATIONS} more violations (--json has all)")
    lines.append("balanced" if ledger.balanced else f"NOT BALANCED: {len(ledger.violations)} violations")
    return "\n".join(lines)
