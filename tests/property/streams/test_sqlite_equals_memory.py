"""The SQLite log and the memory log do the same, whatever one does with them."""

from __future__ import annotations

import tempfile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from laminar.schemas.errors import LaminarError
from laminar.streams.embedded.consumer import EmbeddedConsumer
from laminar.streams.embedded.log import EmbeddedLog
from laminar.streams.log import OutRecord, TopicPartition, TopicSpec
from laminar.streams.memory import MemoryLog
from laminar.streams.sqlite import SqliteLog

TOPICS = (
    TopicSpec(name="plain", partitions=3, max_record_bytes=100_000),
    TopicSpec(name="compact", partitions=2, cleanup="compact"),
)
PARTITIONS = st.sampled_from([TopicPartition(t.name, p) for t in TOPICS for p in range(t.partitions)])
RECORDS = st.builds(
    OutRecord,
    topic=st.sampled_from(["plain", "compact"]),
    key=st.sampled_from([None, b"", b"a", b"b", b"long key"]),
    value=st.one_of(st.none(), st.binary(max_size=8), st.sampled_from([40_000, 100_001]).map(bytes)),
    headers=st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2).map(tuple),
    timestamp_ms=st.one_of(st.none(), st.integers(0, 20_000)),
    partition=st.one_of(st.none(), st.integers(0, 2)),
)


class Both(RuleBasedStateMachine):
    """Every step is done to both; what comes back, errors included, has to be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10.0
        self.folder = tempfile.TemporaryDirectory()
        self.logs: list[EmbeddedLog] = [
            MemoryLog(clock=self.clock, session_timeout_s=1e9),
            SqliteLog(self.folder.name, clock=self.clock, session_timeout_s=1e9),
        ]
        self.producers = [log.producer("p") for log in self.logs]
        self.consumers: dict[str, list[EmbeddedConsumer]] = {}
        for log in self.logs:
            log.create_topics(TOPICS)

    def clock(self) -> float:
        return self.now

    def same(self, do: Any) -> Any:
        """``do(index)`` on both logs."""
        results = []
        for index in range(2):
            try:
                results.append(do(index))
            except LaminarError as error:
                results.append(type(error))
        assert results[0] == results[1]
        return results[0]

    @rule(seconds=st.integers(1, 100_000))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(records=st.lists(RECORDS, max_size=6), fails=st.booleans(), member=st.sampled_from(["a", "b", None]))
    def transaction(self, records: list[OutRecord], fails: bool, member: str | None) -> None:
        def do(index: int) -> None:
            with self.producers[index].transaction() as tx:
                for record in records:
                    tx.send(record)
                if member in self.consumers:
                    consumer = self.consumers[member][index]
                    tx.commit_offsets(consumer.membership(), consumer.position())
                if fails:
                    raise LaminarError

        self.same(do)

    @rule()
    def producer_is_replaced(self) -> None:
        self.producers = [log.producer("p") for log in self.logs]

    @rule(member=st.sampled_from(["a", "b"]), limit=st.integers(1, 20))
    def poll(self, member: str, limit: int) -> None:
        if member not in self.consumers:
            self.consumers[member] = [log.consumer("g", ["plain", "compact"], instance=member) for log in self.logs]
        self.same(lambda index: self.consumers[member][index].poll(limit, 0.0))
        self.same(lambda index: self.consumers[member][index].position())
        self.same(lambda index: self.consumers[member][index].committed())

    @rule(member=st.sampled_from(["a", "b"]))
    def leave(self, member: str) -> None:
        for consumer in self.consumers.pop(member, []):
            consumer.close()

    @rule(member=st.sampled_from(["a", "b"]), partition=PARTITIONS, offset=st.integers(0, 30))
    def seek(self, member: str, partition: TopicPartition, offset: int) -> None:
        if member in self.consumers:
            self.same(lambda index: self.consumers[member][index].seek(partition, offset))
            self.same(lambda index: self.consumers[member][index].poll(3, 0.0))
            self.leave(member)

    @rule(partition=PARTITIONS, offset=st.integers(0, 30), limit=st.integers(1, 10))
    def read(self, partition: TopicPartition, offset: int, limit: int) -> None:
        def do(index: int) -> Any:
            reader = self.logs[index].reader()
            reader.assign({partition: offset})
            return reader.poll(limit, 0.0), reader.position(), reader.bounds(partition)

        self.same(do)

    @rule(partition=PARTITIONS, timestamp_ms=st.integers(0, 25_000))
    def find_time(self, partition: TopicPartition, timestamp_ms: int) -> None:
        self.same(lambda index: self.logs[index].reader().offset_at(partition, timestamp_ms))

    @rule(topic=st.sampled_from(["plain", "compact"]))
    def lag(self, topic: str) -> None:
        self.same(lambda index: (self.logs[index].lag("g", topic), self.logs[index].committed("g", topic)))

    @rule()
    def compact(self) -> None:
        for log in self.logs:
            log.maintain()  # type: ignore[attr-defined]

    @rule()
    def delete_and_create(self) -> None:
        for member in list(self.consumers):
            self.leave(member)
        for log in self.logs:
            log.delete_topic("plain")
            log.create_topics(TOPICS)

    def teardown(self) -> None:
        for log in self.logs:
            log.close()
        self.folder.cleanup()


TestSqliteEqualsMemory = Both.TestCase
TestSqliteEqualsMemory.settings = settings(max_examples=25, stateful_step_count=30)
