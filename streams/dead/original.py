"""What a retry puts on the log: the original as it was, or a new beginning for a member that no rollout could finish.

====================== ==================================================================================
letter of              retry
====================== ==================================================================================
prompts                the record again: a rollout takes the group
trajectories.completed the record again: it is scored
trajectories.scored    the record again: the trainer takes it
trajectories.partial   ``TrajectoryStarted`` with the next attempt, owned by nobody: repack places it
a topic of your own    the record again
any other topic        none: what it said was about that moment (a heartbeat, a command for one process, a manifest)
====================== ==================================================================================

The record again: same key, value and headers, on the same partition if that still exists, with two more headers that
say which letter and which original it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError, Fatal
from laminar.streams.dead_letter import DEAD_LETTERS, RETRY_OF, RETRY_SOURCE
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, LogRecord, OutRecord, TopicPartition
from laminar.streams.reading import read_topic
from laminar.streams.topics import TOPICS, outgoing

__all__ = ["Gone", "original_of", "retry_of"]

_AGAIN = frozenset({"prompts", "trajectories.completed", "trajectories.scored"})
"""Topics of the catalogue whose consumer takes a record again."""
_PARTIAL = "trajectories.partial"
_NOBODY = 0
"""Incarnation of no process (``operators/rollout/event.py``)."""
_FIRST_ATTEMPT = 1000
"""Where retention has removed a member's events: above any number of moves."""


class Gone(Fatal):
    """The letter cannot be retried: its original is not there any more, or a retry of it would mean nothing."""


def original_of(log: Log, letter: r.DeadLetter, deadline: Deadline) -> LogRecord:
    """The record that a letter is about: from the letter, or from its topic where the letter left something out.

    Raises Gone, DeadlineExceeded.
    """
    where = f"{letter.topic}[{letter.partition}]@{letter.offset}"
    if letter.offset < 0:
        raise Gone(f"{letter.topic}: the letter is about a trajectory, not about a record")
    if letter.value is not None and "left out; read them at" not in letter.error:
        return LogRecord(
            topic=letter.topic,
            partition=letter.partition,
            offset=letter.offset,
            timestamp_ms=letter.at_ms,
            key=letter.key,
            value=letter.value,
            headers=tuple((header.key, header.value) for header in letter.headers),
        )
    known = log.topics()
    if letter.topic not in known or letter.partition >= known[letter.topic].partitions:
        raise Gone(f"{where}: the topic or partition does not exist any more, and the letter does not hold the bytes")
    found = _record_at(log, TopicPartition(letter.topic, letter.partition), letter.offset, deadline)
    if found is None:
        raise Gone(f"{where}: the record is not there any more (retention), and the letter does not hold its bytes")
    return found


def retry_of(
    log: Log, codec: Codec, letter: r.DeadLetter, *, letter_place: str, at_ms: int, deadline: Deadline
) -> OutRecord:
    """What a retry of this letter writes. ``letter_place``: ``dead.letters[0]@17``. Raises Gone, DeadlineExceeded."""
    if letter.topic == _PARTIAL and letter.offset < 0 and len(letter.trajectory_ids) == 1:
        return _started_again(log, codec, letter.trajectory_ids[0], letter_place, at_ms, deadline)
    if letter.topic in TOPICS and letter.topic not in _AGAIN:
        raise Gone(
            f"a letter of {letter.topic} cannot be retried: {_why_not(letter.topic)}"
            f" (valid: letters of {', '.join(sorted(_AGAIN))}, and of members that a rollout gave up; or `drop`)"
        )
    original = original_of(log, letter, deadline)
    topic = log.topics().get(letter.topic)
    if topic is None:
        raise Gone(f"{letter.topic}: the topic does not exist any more")
    headers = [h for h in original.headers if h[0] not in (RETRY_OF, RETRY_SOURCE)]
    headers += [(RETRY_OF, letter_place.encode()), (RETRY_SOURCE, original.where.encode())]
    return OutRecord(
        topic=letter.topic,
        key=original.key,
        value=original.value,
        headers=tuple(headers),
        partition=letter.partition if letter.partition < topic.partitions else None,
    )


def _why_not(topic: str) -> str:
    if topic == _PARTIAL:
        return "an event that comes again later would be out of order"
    if topic == "rollouts.commands":
        return "a command is for one process at one moment"
    if topic == DEAD_LETTERS:
        return "there are no letters about letters"
    return "what it said was true at that moment only"


def _record_at(log: Log, partition: TopicPartition, offset: int, deadline: Deadline) -> LogRecord | None:
    reader = log.reader()
    try:
        bounds = reader.bounds(partition)
        if not bounds.start <= offset < bounds.end:
            return None
        reader.assign({partition: offset})
        while reader.position().get(partition, offset) <= offset:
            deadline.check(f"read {partition}@{offset}")
            for record in reader.poll(1, min(0.2, deadline.remaining())):
                return record if record.offset == offset else None
        return None
    finally:
        reader.close()


def _started_again(
    log: Log, codec: Codec, trajectory_id: str, letter_place: str, at_ms: int, deadline: Deadline
) -> OutRecord:
    """The member begins anew, from its prompt."""
    started: r.TrajectoryStarted | None = None
    attempt, partition, owner = -1, None, ""
    for record, event in _events_of(log, codec, trajectory_id, deadline):
        if isinstance(event, r.TrajectoryStarted | r.TrajectoryMoved | r.TrajectoryEnded):
            attempt, partition = max(attempt, event.attempt), record.partition
        if isinstance(event, r.TrajectoryStarted):
            started, owner = event, event.rollout_id
        elif isinstance(event, r.TrajectoryMoved):
            owner = event.to_rollout
    prompt = started.prompt if started is not None else _prompt_of(log, codec, trajectory_id, deadline)
    if prompt is None:
        raise Gone(
            f"{trajectory_id}: neither {_PARTIAL} nor prompts has its prompt any more (retention),"
            f" so it cannot begin anew"
        )
    again = r.TrajectoryStarted(
        trajectory_id=trajectory_id,
        attempt=attempt + 1 if attempt >= 0 else _FIRST_ATTEMPT,
        member=int(trajectory_id.rpartition("/")[2]),
        prompt=prompt,
        rollout_id=owner or "nobody",
        incarnation=_NOBODY,
        version=prompt.min_version,
        engine="none",
        seed=started.seed if started is not None else prompt.seed,
        at_ms=at_ms,
    )
    out = outgoing(codec, again, partition=partition)
    return OutRecord(
        topic=out.topic,
        key=out.key,
        value=out.value,
        headers=((RETRY_OF, letter_place.encode()),),
        partition=out.partition,
    )


def _events_of(log: Log, codec: Codec, trajectory_id: str, deadline: Deadline) -> Iterator[tuple[LogRecord, r.Record]]:
    """The member's lifecycle events but for its tokens."""
    key = trajectory_id.encode()
    for record in read_topic(log, _PARTIAL, deadline):
        if record.key != key or record.value is None:
            continue
        schema = codec.schema_of(record.value)
        if schema is None or schema.name == r.TrajectoryTokens.__name__:
            continue
        try:
            yield record, codec.decode(record.value)
        except DecodeError:
            continue  # damaged; the others say enough


def _prompt_of(log: Log, codec: Codec, trajectory_id: str, deadline: Deadline) -> r.Prompt | None:
    key = r.group_id_of(trajectory_id).encode()
    for record in read_topic(log, "prompts", deadline):
        if record.key != key or record.value is None:
            continue
        try:
            event = codec.decode(record.value)
        except DecodeError:
            continue
        if isinstance(event, r.Prompt):
            return event
    return None
