"""Offsets that retention has removed before a group has read them: where the group goes on, and the record of it."""

from __future__ import annotations

import logging
from typing import Literal

from laminar.schemas.codec import Codec
from laminar.schemas.records import OffsetsSkipped
from laminar.streams.hand import Entry
from laminar.streams.log import Consumer, Log
from laminar.streams.topics import outgoing

__all__ = ["LostOffsets", "skip_lost"]

logger = logging.getLogger(__name__)

LostOffsets = Literal["stop", "jump"]
"""What happens when retention has removed records that were still to be read."""


def skip_lost(log: Log, consumer: Consumer, codec: Codec, *, operator: str, group: str, now: float) -> list[Entry]:
    """Put the consumer on the first record that is left, wherever it stands before that.

    One finished entry a jump: the offset to commit is the jump's target, the output tells of it.
    """
    reader = log.reader()
    jumps: list[Entry] = []
    try:
        for partition, position in consumer.position().items():
            start = reader.bounds(partition).start
            if position >= start:
                continue
            logger.warning(
                "%s: %s: offsets %d to %d are gone, going on at %d", operator, partition, position, start - 1, start
            )
            entry = Entry(partition, start, skipped=start - position)
            skipped = OffsetsSkipped(
                operator=operator,
                group=group,
                topic=partition.topic,
                partition=partition.partition,
                from_offset=position,
                to_offset=start,
                at_ms=int(now * 1000),
            )
            entry.finish([outgoing(codec, skipped)])
            consumer.seek(partition, start)
            jumps.append(entry)
    finally:
        reader.close()
    return jumps
