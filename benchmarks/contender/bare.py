"""The reference: consume, transform, produce, in one transaction a batch, with nothing but confluent-kafka.

``python -m benchmarks.contender.bare BOOTSTRAP SOURCE TARGET GROUP WORK``. WORK ``score`` decodes the trajectory,
scores it and encodes the result with Laminar's codec, as the reward operator has to; ``copy`` passes the bytes on. It
restarts after nothing, rewinds nothing, dead-letters nothing.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from laminar.operators.reward.functions import exact
from laminar.schemas.codec import Codec
from laminar.schemas.records import CompletedTrajectory, ScoredTrajectory

BATCH = 500
CODEC = Codec()


def score(value: bytes) -> bytes:
    """One trajectory, scored."""
    trajectory = CODEC.decode(value)
    if not isinstance(trajectory, CompletedTrajectory):
        raise SystemExit(f"a {type(trajectory).__name__} cannot be scored")
    start = time.perf_counter()
    found = exact(trajectory)
    return CODEC.encode(
        ScoredTrajectory(
            trajectory=trajectory,
            reward=found.reward,
            failure=found.failure,
            function="exact",
            latency_ms=(time.perf_counter() - start) * 1e3,
            scored_ms=int(time.time() * 1000),
        )
    )


def copy(value: bytes) -> bytes:
    """The same bytes."""
    return value


def main() -> None:
    """Until it is killed."""
    bootstrap, source, target, group, work = sys.argv[1:]
    transform = {"score": score, "copy": copy}[work]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": "consumer",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([source])
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": group,
            "compression.type": "zstd",
            "linger.ms": 5,
            "batch.size": 1_000_000,
        }
    )
    producer.init_transactions()
    while True:
        messages: list[Message] = consumer.consume(BATCH, timeout=0.05)
        if not messages:
            continue
        producer.begin_transaction()
        offsets: dict[tuple[str, int], int] = {}
        for message in messages:
            if message.error() is not None:
                raise SystemExit(str(message.error()))
            producer.produce(target, value=transform(message.value() or b""), key=message.key())
            offsets[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1
        positions = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        producer.commit_transaction()


if __name__ == "__main__":
    main()
