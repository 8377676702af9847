"""Both framings, schemas that are not ours, and a registry that comes and goes: the loop on the real broker."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError, Unavailable
from laminar.schemas.framing import registered_form
from laminar.schemas.schema_set import PACKAGED
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, OutRecord
from laminar.streams.loop import Loop
from laminar.streams.open import KafkaLogConfig, open_codec, open_log
from laminar.streams.reading import read_topic
from laminar.streams.registry import RegistryConfig
from laminar.streams.topics import topic_specs
from laminar.streams.worker import Inline
from tests.integration.streams.registry.conftest import Open
from tests.support import sample
from tests.support.apicurio import Apicurio
from tests.support.gate import Gate

IN, OUT, DEAD = "trajectories.completed", "trajectories.scored", "dead.letters"
RUN = "run"
WAIT_S = 60.0
BARE = Codec()


@pytest.fixture
def client(apicurio: Apicurio) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": apicurio.url, "timeout": WAIT_S}) as opened:
        yield opened


@pytest.fixture
def log(broker: Broker) -> Iterator[Log]:
    with closing(open_log(KafkaLogConfig(bootstrap=broker.bootstrap), run_id=uuid.uuid4().hex[:8])) as log:
        log.create_topics([s for s in topic_specs({IN: 1, OUT: 1}) if s.name in (IN, OUT, DEAD)])
        yield log


def write(log: Log, *values: bytes) -> None:
    with closing(log.producer("writer")) as producer, producer.transaction() as tx:
        for value in values:
            tx.send(OutRecord(topic=IN, key=b"k", value=value, partition=0))


def score(record: r.Record) -> list[r.Record]:
    assert isinstance(record, r.CompletedTrajectory)
    return [sample.scored(record)]


def loop_of(log: Log, codec: Codec) -> Loop:
    return Loop(
        log=log,
        codec=codec,
        name="reward",
        group=f"{RUN}.reward",
        instance="reward-0",
        transactional_id=f"{RUN}.reward-0",
        topics=[IN],
        worker=Inline(score),
    )


def drive(loop: Loop, log: Log) -> None:
    """Step until everything is committed."""
    deadline = Deadline.after(WAIT_S, "the lag reaches 0")
    while any(log.lag(f"{RUN}.reward", IN).values()):
        loop.step(time.time())
        deadline.check()


def read(log: Log, topic: str, codec: Codec) -> list[r.Record]:
    return [codec.decode(found.value or b"") for found in read_topic(log, topic, Deadline.after(WAIT_S, topic))]


def plain(record: r.Record) -> dict[str, Any]:
    """For a serializer that is not ours."""
    return dataclasses.asdict(record)  # type: ignore[call-overload]


def newer(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    form = copy.deepcopy(registered_form(PACKAGED.current(name).whole))
    form["fields"] += fields
    return form


def registered(client: SchemaRegistryClient, schema: str, kind: str = "AVRO") -> bytes:
    """The frame's header of a schema that stands under a subject of its own."""
    schema_id = client.register_schema(f"other-{uuid.uuid4().hex}", Schema(schema, kind))
    return b"\0" + schema_id.to_bytes(4, "big")


@pytest.mark.kafka
def test_s19_what_a_newer_release_or_somebody_else_registered_is_resolved_and_the_rest_a_dead_letter(
    log: Log, apicurio: Apicurio, open_registry: Open, client: SchemaRegistryClient
) -> None:
    codec = Codec(registry=open_registry())
    codec.prepare()
    schema = newer("CompletedTrajectory", {"name": "cost", "type": "double", "default": 0.0})
    serializer = AvroSerializer(client, json.dumps(schema), conf={"subject.name.strategy": lambda ctx, name: name})
    theirs = sample.completed(sample.prompt(1))
    written = serializer({**plain(theirs), "cost": 1.5}, SerializationContext(IN, MessageField.VALUE))
    assert written is not None
    first, last = sample.completed(sample.prompt(0)), sample.completed(sample.prompt(2))
    unknown = b"\0\x00\x06\x79\x32" + codec.encode(first)[5:]
    foreign = registered(client, '{"type": "record", "namespace": "com.acme", "name": "Prompt", "fields": []}')
    write(log, codec.encode(first), written, unknown, foreign, codec.encode(first)[:-4], codec.encode(last))
    with closing(loop_of(log, codec)) as loop:
        drive(loop, log)
    scored = [x.trajectory for x in read(log, OUT, codec) if isinstance(x, r.ScoredTrajectory)]
    assert scored == [first, theirs, last]
    letters = {x.offset: x for x in read(log, DEAD, codec) if isinstance(x, r.DeadLetter)}
    assert {offset: letter.kind for offset, letter in letters.items()} == dict.fromkeys((2, 3, 4), "DecodeError")
    assert "schema id 424242: unknown to the schema registry" in letters[2].error
    assert "is com.acme.Prompt: not a record of this release" in letters[3].error
    assert "CompletedTrajectory v2: EOFError" in letters[4].error
    assert letters[2].value == unknown


@pytest.mark.kafka
def test_a_topic_may_hold_both_framings_and_each_is_read_with_a_registry(log: Log, open_registry: Open) -> None:
    codec = Codec(registry=open_registry())
    records = [sample.completed(sample.prompt(i)) for i in range(6)]
    write(log, *(BARE.encode(record) for record in records[:2]))
    write(log, *((codec, BARE)[i % 2].encode(record) for i, record in enumerate(records[2:])))
    with closing(loop_of(log, codec)) as loop:
        drive(loop, log)
    scored = list(read_topic(log, OUT, Deadline.after(WAIT_S, OUT)))
    assert {(found.value or b"")[:1] for found in scored} == {b"\0"}
    assert [x.trajectory for x in read(log, OUT, codec) if isinstance(x, r.ScoredTrajectory)] == records
    assert read(log, DEAD, codec) == []


@pytest.mark.kafka
def test_while_the_registry_is_away_known_schemas_go_on_and_an_unknown_one_is_no_dead_letter(
    log: Log, counted: Gate, open_registry: Open, client: SchemaRegistryClient
) -> None:
    codec = Codec(registry=open_registry(counted.url, timeout_s=2.0))
    records = [sample.completed(sample.prompt(i)) for i in range(4)]
    write(log, codec.encode(records[0]))
    with closing(loop_of(log, codec)) as loop:
        drive(loop, log)
        counted.status = 503
        write(log, codec.encode(records[1]))
        drive(loop, log)
        schema = newer("CompletedTrajectory", {"name": "hue", "type": "string", "default": ""})
        write(
            log, registered(client, json.dumps(schema)) + codec.encode(records[2])[5:] + b"\0", codec.encode(records[3])
        )
        with pytest.raises(Unavailable, match=r"has schema id \d+: not within 2 s \(it answers 503"):
            drive(loop, log)
    counted.status = None
    with closing(loop_of(log, codec)) as loop:
        drive(loop, log)
    assert [x.trajectory for x in read(log, OUT, codec) if isinstance(x, r.ScoredTrajectory)] == records
    assert read(log, DEAD, codec) == []


def test_a_schema_with_logical_types_gives_plain_numbers(open_registry: Open, client: SchemaRegistryClient) -> None:
    schema = newer("DrainCommand")
    schema["fields"][-1]["type"] = {"type": "long", "logicalType": "timestamp-millis"}
    command = r.DrainCommand(rollout_id="rollout-0", incarnation=5, at_ms=1_700_000_000_000)
    codec = Codec(registry=open_registry())
    assert codec.decode(registered(client, json.dumps(schema)) + codec.encode(command)[5:]) == command


@pytest.mark.parametrize(
    ("schema", "kind", "words"),
    [
        (
            '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}',
            "JSON",
            "is no record: not a record of this release",
        ),
        ('"string"', "AVRO", "is no record: not a record of this release"),
        ('{"type": "record", "namespace": "laminar", "name": "Tokens", "fields": []}', "AVRO", "laminar.Tokens: not a"),
        (
            '{"type": "record", "namespace": "laminar", "name": "DrainCommand", "fields": []}',
            "AVRO",
            "cannot be resolved to the schema of this release",
        ),
    ],
)
def test_what_no_schema_of_ours_can_be_made_of_is_undecodable(
    open_registry: Open, client: SchemaRegistryClient, schema: str, kind: str, words: str
) -> None:
    with pytest.raises(DecodeError, match=words):
        Codec(registry=open_registry()).decode(registered(client, schema, kind))


def test_a_log_that_is_not_kafka_has_no_registry_and_its_codec_says_what_is_missing(open_registry: Open) -> None:
    data = Codec(registry=open_registry()).encode(sample.prompt())
    with pytest.raises(DecodeError, match=r"framed for a schema registry, schema id \d+, and log.registry.url is not"):
        BARE.decode(data)


def test_the_codec_of_a_kafka_log_with_a_registry_writes_its_framing(apicurio: Apicurio) -> None:
    settings = RegistryConfig(url=apicurio.url)
    assert open_codec(KafkaLogConfig(registry=settings)).encode(sample.prompt())[:1] == b"\0"
    assert open_codec(KafkaLogConfig()).encode(sample.prompt())[:2] == b"\xc3\x01"
