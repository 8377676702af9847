"""``laminar topics``: the topics of a run's log."""

from __future__ import annotations

import json

import typer

from laminar.pipeline.commands.arguments import AsJson, ConfigPath, Overrides, opened_log
from laminar.pipeline.commands.table import table
from laminar.streams.reading import partitions_of
from laminar.streams.topics import TOPICS

__all__ = ["command"]


def command(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the topics of a run's log: partitions, offsets in use, key, and what one record says."""
    rows: list[dict[str, object]] = []
    with opened_log(config, overrides) as (_, log):
        reader = log.reader()
        for name, info in sorted(log.topics().items(), key=lambda item: _place(item[0])):
            bounds = [reader.bounds(partition) for partition in partitions_of(log, name)]
            known = TOPICS.get(name)
            rows.append(
                {
                    "topic": name,
                    "partitions": info.partitions,
                    "offsets": sum(b.end - b.start for b in bounds),
                    "cleanup": info.cleanup,
                    "key": known.key_name if known else "",
                    "says": known.doc if known else "",
                }
            )
        reader.close()
    typer.echo(json.dumps(rows, indent=2) if as_json else table(rows))


def _place(name: str) -> tuple[int, str]:
    names = list(TOPICS)
    return (names.index(name), "") if name in TOPICS else (len(names), name)
