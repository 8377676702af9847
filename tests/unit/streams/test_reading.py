from __future__ import annotations

import logging

import pytest

from laminar.schemas import records as r
from laminar.streams.log import OutRecord
from laminar.streams.reading import Tail, decoded, skipped
from laminar.streams.topics import outgoing
from tests.support.dataflow import World


def test_what_does_not_decode_is_logged_with_its_place_and_the_rest_is_read(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    commands = [r.DrainCommand(rollout_id="rollout-0", incarnation=i, at_ms=0) for i in range(2)]
    first, last = (outgoing(world.codec, command) for command in commands)
    producer = world.log.producer("test")
    with producer.transaction() as tx:
        for record in (
            first,
            OutRecord(topic=first.topic, key=first.key, value=b"not framed"),
            OutRecord(topic=first.topic, key=first.key, value=None),
            last,
        ):
            tx.send(record)
    skipped.clear()
    with caplog.at_level(logging.WARNING):
        found = list(decoded(Tail(world.log, [first.topic]).poll(), world.codec))
    assert [(record.offset, event) for record, event in found] == [(0, commands[0]), (3, commands[1])]
    (line,) = caplog.messages
    assert line.startswith("rollouts.commands[0]@1: skipped: ")


def test_a14_a_record_of_another_topic_is_passed_over_with_a_warning_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    strange = r.RunEnded(run_id="run", epoch=0, step=1, reason="not here", at_ms=0)
    producer = world.log.producer("test")
    with producer.transaction() as tx:
        for _ in range(25):
            tx.send(OutRecord(topic="rollouts.status", key=b"rollout-0", value=world.codec.encode(strange)))
    skipped.clear()
    with caplog.at_level(logging.WARNING):
        assert list(decoded(Tail(world.log, ["rollouts.status"]).poll(), world.codec)) == []
    assert skipped == {"rollouts.status": 25}
    assert [line.split(": ")[0] for line in caplog.messages] == ["rollouts.status[0]@0", "rollouts.status[0]@9"]
    assert "a RunEnded does not belong on rollouts.status (valid: RolloutStatus)" in caplog.messages[0]
