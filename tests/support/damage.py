"""Records of every kind of damage, for every topic."""

from __future__ import annotations

import random
from collections.abc import Mapping

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.log import OutRecord
from laminar.streams.topics import TOPICS
from tests.support.every_record import every_record

__all__ = ["KEYS", "SETTLED", "damaged", "strangers"]

SETTLED = ("prompts", "trajectories.completed", "trajectories.scored")
"""Topics whose reader writes a dead letter for what it cannot process."""

KEYS: Mapping[str, bytes] = {"rollouts.commands": b"rollout-0", "rollouts.status": b"rollout-0"}
"""So that its reader looks at the value."""

_HEADERS = (
    ("traceparent", b"00-ab-cd-01"),
    ("", b""),
    ("binary", bytes(range(256))),
    ("laminar-retry-of", b"\xff not a place"),
    ("number", (7).to_bytes(8, "little")),
)


def damaged(topic: str, codec: Codec, *, large: bool = False) -> dict[str, OutRecord]:
    """Kind of damage -> a record with it, for one topic. ``large``: with a value of 60 MB as well."""
    rng = random.Random(topic)
    sound = next(x for x in every_record() if isinstance(x, TOPICS[topic].records))
    value = codec.encode(sound)
    other = codec.encode(next(x for x in every_record() if not isinstance(x, TOPICS[topic].records)))
    key = KEYS.get(topic, b"data/0/0")
    values: dict[str, bytes | None] = {
        "truncated": value[:-3],
        "half": value[: len(value) // 2],
        "only a frame": value[:10],
        "not even a frame": value[:7],
        "trailing bytes": value + b"x",
        "wrong fingerprint": value[:4] + bytes([value[4] ^ 0x55]) + value[5:],
        "unknown schema": b"\xc3\x01" + rng.randbytes(8) + value[10:],
        "unknown registry id": b"\x00\x7f\xff\xff\xff" + value[10:],
        "no value": None,
        "empty": b"",
        "random bytes": rng.randbytes(300),
        "text": b'{"json": true}',
        "lengths that lie": value[:10] + b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f" + value[10:],
        "negative lengths": value[:10] + b"\x01" * 40,
        "of another topic": other,
    }
    if large:
        values["60 MB"] = value[:10] + bytes(60_000_000)
    found = {kind: OutRecord(topic=topic, key=key, value=v, partition=0) for kind, v in values.items()}
    found["headers"] = OutRecord(topic=topic, key=key, value=value[:-1], headers=_HEADERS, partition=0)
    found["key that is not text"] = OutRecord(topic=topic, key=b"\xff\xfe\x00\xc3", value=value[:-1], partition=0)
    if not TOPICS[topic].spec.cleanup.startswith("compact"):
        found["no key"] = OutRecord(topic=topic, key=None, value=value[:-1], partition=0)
    found["long key"] = OutRecord(topic=topic, key=b"k" * 300_000, value=value[:-1], partition=0)
    return found


def strangers() -> list[r.Record]:
    """Sound records that say nothing sensible about this run, or are of another one."""
    empty = r.RolloutStatus(
        rollout_id="stranger",
        incarnation=1 << 60,
        state="idle",
        version=0,
        kv_used=-1,
        kv_total=0,
        running=0,
        waiting=0,
        preempted=0,
        max_running=0,
        tokens_per_s=float("nan"),
        in_flight=(),
        at_ms=0,
    )
    letter = r.DeadLetter(
        operator="stranger",
        kind="Strange",
        error="",
        topic="no.such.topic",
        partition=-7,
        offset=-7,
        attempt=0,
        key=b"\xff",
        value=None,
        trajectory_ids=("no-slash", "a/b/c/d", ""),
        at_ms=0,
    )
    settled = r.DeadLetterSettled(
        letter_partition=9,
        letter_offset=1 << 40,
        action="retry",
        key=None,
        trajectory_ids=("no-slash", "a/b/c/d", ""),
        by="nobody",
        at_ms=0,
    )
    skipped = r.OffsetsSkipped(
        operator="stranger", group="g", topic="no.such.topic", partition=0, from_offset=9, to_offset=1, at_ms=0
    )
    other_run = r.RunEnded(run_id="another", epoch=99, step=99, reason="over", at_ms=0)
    return [empty, letter, settled, skipped, other_run]
