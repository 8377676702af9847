"""The schema registry beside a Kafka log: its settings and what the codec asks of it."""

from laminar.streams.registry.settings import RegistryConfig

__all__ = ["RegistryConfig"]
