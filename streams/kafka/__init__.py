"""The log on Apache Kafka, through confluent-kafka. See ``laminar.streams.log`` for the port."""

from laminar.streams.kafka.log import KafkaLog

__all__ = ["KafkaLog"]
