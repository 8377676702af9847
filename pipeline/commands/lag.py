"""``laminar lag``: how far each consumer group is behind."""

from __future__ import annotations

import json
import time

import typer

from laminar.pipeline.commands.arguments import AsJson, ConfigPath, Overrides, opened_log
from laminar.pipeline.commands.table import table
from laminar.pipeline.lag import consumptions, oldest_timestamps

__all__ = ["command"]


def command(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print how far each consumer group is behind, per topic and partition.

    oldest_s: seconds since the first record was written that the group has not committed yet.
    """
    rows: list[dict[str, object]] = []
    with opened_log(config, overrides) as (run, log):
        reader = log.reader()
        for item in consumptions(run):
            committed = log.committed(item.group, item.topic)
            lag = log.lag(item.group, item.topic)
            oldest = oldest_timestamps(reader, {p: committed.get(p, 0) for p, n in lag.items() if n})
            for partition, records in sorted(lag.items()):
                age_s = max(0, round(time.time() - oldest[partition] / 1000)) if partition in oldest else None
                rows.append(
                    {
                        "group": item.group,
                        "topic": item.topic,
                        "partition": partition.partition,
                        "committed": committed.get(partition),
                        "end": reader.bounds(partition).end,
                        "lag": records,
                        "oldest_s": age_s,
                    }
                )
        reader.close()
    typer.echo(json.dumps(rows, indent=2) if as_json else table(rows))
