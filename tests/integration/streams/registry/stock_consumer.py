"""A consumer that knows nothing of Laminar: confluent-kafka, a registry's address and topic names.

``python -I stock_consumer.py BOOTSTRAP REGISTRY TOPIC ...`` prints each record as a line of JSON, bytes in hexadecimal.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, DeserializingConsumer, KafkaError, TopicPartition
from confluent_kafka.error import ConsumeError
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer

WAIT_S = 60.0


def in_hexadecimal(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: in_hexadecimal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [in_hexadecimal(item) for item in value]
    return value


def main(bootstrap: str, registry: str, topics: list[str]) -> None:
    faulthandler.dump_traceback_later(3 * WAIT_S, exit=True)  # where it hangs, if it does
    consumer = DeserializingConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "stock",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "value.deserializer": AvroDeserializer(SchemaRegistryClient({"url": registry})),
        }
    )
    described = consumer.list_topics(timeout=WAIT_S).topics
    left = {(topic, partition) for topic in topics for partition in described[topic].partitions}
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for topic, partition in left])
    while left:
        try:
            message = consumer.poll(WAIT_S)
        except ConsumeError as error:
            if error.code != KafkaError._PARTITION_EOF:
                raise
            left.discard((error.kafka_message.topic(), error.kafka_message.partition()))
            continue
        if message is None:
            sys.exit(f"no answer about {left}")
        line = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
        print(json.dumps({**line, "value": in_hexadecimal(message.value())}))  # noqa: T201
    consumer.close()
    if any(name == "laminar" or name.startswith("laminar.") for name in sys.modules):
        sys.exit("laminar was imported")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
