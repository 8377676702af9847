from __future__ import annotations

import logging

import pytest

from laminar.schemas import records as r
from laminar.streams.log import OutRecord
from laminar.streams.reading import Tail, decoded
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
    with caplog.at_level(logging.WARNING):
        found = list(decoded(Tail(world.log, [first.topic]).poll(), world.codec))
    assert [(record.offset, event) for record, event in found] == [(0, commands[0]), (3, commands[1])]
    (line,) = caplog.messages
    assert line.startswith("rollouts.commands[0]@1: skipped: ")
