"""A long run as records, made without operators: for what is about size."""

from __future__ import annotations

from collections.abc import Iterator

from laminar.schemas import records as r
from laminar.streams.log import LogRecord, OutRecord
from laminar.streams.topics import TOPICS, Encoder, outgoing
from tests.support import sample

__all__ = ["as_read", "synthetic_run"]


def synthetic_run(
    codec: Encoder,
    *,
    steps: int,
    groups_per_step: int = 16,
    group_size: int = 16,
    deltas: int = 2,
    n_tokens: int = 64,
    in_flight_steps: int = 2,
    moved_every: int = 10,
) -> Iterator[list[OutRecord]]:
    """The transactions of a run in which all goes well, step by step; each sample is trained two steps after it began.

    One in ``moved_every`` members changes its owner.
    """
    response = sample.tokens(n_tokens)
    piece = sample.tokens(n_tokens // deltas)
    yield [outgoing(codec, sample.trainer_started(epoch=0))]
    waiting: list[list[str]] = []
    n_scored = 0
    for step in range(1, steps + 1):
        ids: list[str] = []
        for group in range(groups_per_step):
            of = sample.prompt((step - 1) * groups_per_step + group, group_size=group_size)
            out = [outgoing(codec, of)]
            for member in range(group_size):
                done = sample.completed(of, member, response=response)
                name = done.trajectory_id
                ids.append(name)
                out.append(outgoing(codec, sample.started(of, member)))
                attempt = 0
                for number in range(deltas):
                    if number == 1 and (len(ids) % moved_every) == 0:
                        out += _move(codec, of, member, piece.n_tokens)
                        attempt = 1
                    out.append(
                        outgoing(
                            codec,
                            r.TrajectoryTokens(
                                trajectory_id=name,
                                attempt=attempt,
                                start=number * piece.n_tokens,
                                tokens=piece,
                                at_ms=1,
                            ),
                        )
                    )
                if attempt:
                    done = sample.completed(of, member, response=response, attempt=1, rollout_id="rollout-1")
                out.append(outgoing(codec, sample.ended(name, attempt=attempt, n_tokens=n_tokens)))
                out.append(outgoing(codec, done))
                out.append(outgoing(codec, sample.scored(done)))
                n_scored += 1
            yield out
        waiting.append(ids)
        if len(waiting) > in_flight_steps:
            number = step - in_flight_steps
            trained = waiting.pop(0)
            yield [
                outgoing(codec, sample.training_step(number, epoch=0, trained=trained, staleness={"1": len(trained)}))
            ]


def _move(codec: Encoder, of: r.Prompt, member: int, n_tokens: int) -> list[OutRecord]:
    name = r.trajectory_id(of.prompt_id, member)
    move = r.TrajectoryMoved(
        trajectory_id=name,
        attempt=1,
        reason="dead",
        from_rollout="rollout-0",
        to_rollout="rollout-1",
        to_incarnation=1,
        n_tokens=n_tokens,
        at_ms=1,
    )
    snapshot = r.Snapshot(
        trajectory_id=name,
        attempt=1,
        member=member,
        prompt=of,
        response=sample.tokens(n_tokens),
        version=0,
        seed=0,
        timings=r.Timings(),
    )
    adopt = r.AdoptCommand(
        rollout_id="rollout-1", incarnation=1, reason="dead", from_rollout="rollout-0", snapshot=snapshot, at_ms=1
    )
    return [outgoing(codec, move), outgoing(codec, adopt)]


def as_read(transactions: Iterator[list[OutRecord]]) -> Iterator[LogRecord]:
    """The records as a reader would see them, each topic with one partition."""
    ends = dict.fromkeys(TOPICS, 0)
    for records in transactions:
        for record in records:
            yield LogRecord(
                topic=record.topic,
                partition=0,
                offset=ends[record.topic],
                timestamp_ms=0,
                key=record.key,
                value=record.value,
                headers=record.headers,
            )
            ends[record.topic] += 1
