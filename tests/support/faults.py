"""Faults of the memory log drawn from a seed: a process may die, or get no answer, at any point of a transaction."""

from __future__ import annotations

import random

from laminar.schemas.errors import Aborted, Unavailable
from laminar.streams.log import TopicPartition
from laminar.streams.memory import Point

__all__ = ["Crash", "Faults"]


class Crash(BaseException):
    """The process dies here."""


class Faults:
    """Rates per transaction; 0 turns them off."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng = rng
        self.rate = rate

    def at(self, point: Point, transactional_id: str) -> None:
        if self.rng.random() >= self.rate:
            return
        if point == "before_commit":
            raise self.rng.choice([Aborted("no"), Crash()])
        raise self.rng.choice([Unavailable("no answer"), Crash()]) if point == "after_commit" else Crash()

    def late(self, who: str, partition: TopicPartition) -> bool:
        return self.rng.random() < self.rate

    def away(self) -> bool:
        return False
