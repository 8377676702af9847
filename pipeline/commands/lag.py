"""``laminar lag``: how far each consumer group is behind."""

from __future__ import annotations

import json

import typer

from laminar.pipeline.commands.arguments import AsJson, ConfigPath, Overrides, opened_log
from laminar.pipeline.commands.table import table
from laminar.pipeline.lag import consumptions

__all__ = ["command"]


def command(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print how far each consumer group is behind, per topic and partition."""
    rows: list[dict[str, object]] = []
    with opened_log(config, overrides) as (run, log):
        reader = log.reader()
        for item in consumptions(run):
            committed = log.committed(item.group, item.topic)
            for partition, records in sorted(log.lag(item.group, item.topic).items()):
                rows.append(
                    {
                        "group": item.group,
                        "topic": item.topic,
                        "partition": partition.partition,
                        "committed": committed.get(partition),
                        "end": reader.bounds(partition).end,
                        "lag": records,
                    }
                )
        reader.close()
    typer.echo(json.dumps(rows, indent=2) if as_json else table(rows))
