"""The log in one process's memory: for unit tests and for the deterministic simulator."""

from laminar.streams.memory.broker import MemoryBroker
from laminar.streams.memory.faults import NO_FAULTS, Faults, NoFaults, Point, Undecided
from laminar.streams.memory.log import MemoryLog

__all__ = ["NO_FAULTS", "Faults", "MemoryBroker", "MemoryLog", "NoFaults", "Point", "Undecided"]
