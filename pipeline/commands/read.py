"""``laminar read``: records of a topic, decoded, one JSON object a line."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from laminar.pipeline.commands.arguments import ConfigPath, Overrides, opened_log
from laminar.pipeline.config.schema import did_you_mean
from laminar.pipeline.printing import as_json
from laminar.schemas.codec import Codec
from laminar.schemas.errors import ConfigError, DecodeError
from laminar.streams.log import Log, LogRecord, TopicPartition
from laminar.streams.open import open_codec
from laminar.streams.reading import partitions_of

__all__ = ["command", "moment_ms"]

_UNITS_S: Mapping[str, float] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def moment_ms(text: str, now: float) -> int:
    """``15m`` (ago; s, m, h, d), an ISO time (UTC unless it says otherwise), or epoch milliseconds. Raises ConfigError.

    >>> moment_ms("15m", now=1000.0)
    100000
    """
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if ago:
        return int((now - float(ago[1]) * _UNITS_S[ago[2]]) * 1000)
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--since {text}: not a time (valid: 15m, 2026-01-31T12:00:00, or epoch milliseconds)"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def command(
    config: ConfigPath,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="See `laminar topics`.", show_default=False)],
    overrides: Overrides = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this one.")] = None,
    offset: Annotated[int | None, typer.Option(help="Begin there; negative: so many before the end.")] = None,
    since: Annotated[str | None, typer.Option(help="Begin at a time: 15m (ago), ISO, or epoch milliseconds.")] = None,
    key: Annotated[str | None, typer.Option(help="Only records with this key.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print every token id, logprob and version.")] = False,
) -> None:
    """Print records of a topic as JSON lines, in order per partition; without --follow up to the end as it is now."""
    if offset is not None and since is not None:
        raise ConfigError("--offset and --since: give one of them")
    with opened_log(config, overrides) as (run, log):
        codec = open_codec(run.log)
        reader = log.reader()
        positions, ends = _range(log, topic, partition, offset, since)
        reader.assign(positions)
        left = limit
        while left is None or left > 0:
            records = reader.poll(500, 0.2)
            for record in records:
                if not follow and record.offset >= ends[record.source]:
                    continue
                if key is not None and (record.key or b"").decode("utf-8", "replace") != key:
                    continue
                if left is not None:
                    if left == 0:
                        break
                    left -= 1
                typer.echo(json.dumps(_line(codec, record, tokens=tokens), ensure_ascii=False))
            sys.stdout.flush()
            at = reader.position()
            if not follow and all(at.get(where, 0) >= end for where, end in ends.items()):
                break
        reader.close()


def _range(
    log: Log, topic: str, partition: int | None, offset: int | None, since: str | None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Where to begin and to end, per partition."""
    known = log.topics()
    if topic not in known:
        raise ConfigError(f"{topic}: no such topic ({did_you_mean(topic, sorted(known))})")
    chosen = partitions_of(log, topic)
    if partition is not None:
        chosen = [p for p in chosen if p.partition == partition]
        if not chosen:
            raise ConfigError(f"--partition {partition}: {topic} has no such partition")
    reader = log.reader()
    positions, ends = {}, {}
    for where in chosen:
        start, end = reader.bounds(where)
        if since is not None:
            positions[where] = reader.offset_at(where, moment_ms(since, time.time()))
        elif offset is None:
            positions[where] = start
        else:
            positions[where] = max(start, min(end, end + offset if offset < 0 else offset))
        ends[where] = end
    reader.close()
    return positions, ends


def _line(codec: Codec, record: LogRecord, *, tokens: bool) -> dict[str, Any]:
    line: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "at": datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "key": record.key.decode("utf-8", "replace") if record.key is not None else None,
    }
    if record.headers:
        line["headers"] = {name: value.decode("utf-8", "replace") for name, value in record.headers}
    if record.value is None:
        return {**line, "type": None, "record": None}
    try:
        decoded = codec.decode(record.value)
    except DecodeError as error:
        return {**line, "type": None, "error": str(error), "value": as_json(record.value)}
    return {**line, "type": type(decoded).__name__, "record": as_json(decoded, tokens=tokens)}
