"""Notices what happens to topics under a running process (KIP-516: every topic has an id besides its name).

* Deleted and made again: the records, and the offsets that groups had committed, are gone. Going on would read the new
  topic from its beginning, or from the middle, as if nothing had happened: TopicMismatch, which ends the process.
* Deleted: UnknownTopic.
* Given more partitions: said, and what is remembered of the topic is asked again.

``look`` costs nothing but a glance at the clock most of the time, and never waits; ``verify`` waits for the answer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from laminar.schemas.errors import TopicMismatch, UnknownTopic
from laminar.streams.kafka.errors import error_of

__all__ = ["TopicWatch"]

_log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_ABSENCES = 3
"""A broker that has just started may not know of every topic yet."""


class TopicWatch:
    """The topics that one process works with. Not for topics that it only lists."""

    def __init__(self, bootstrap: str, client: Callable[[], AdminClient], on_growth: Callable[[str], None]) -> None:
        """``on_growth`` is told of a topic that has more partitions than before."""
        self._bootstrap = bootstrap
        self._client = client
        self._on_growth = on_growth
        self._ids: dict[str, str] = {}
        self._partitions: dict[str, int] = {}
        self._absent: Counter[str] = Counter()
        self._asked: Mapping[str, Future[Any]] = {}
        self._next = 0.0

    def note(self, name: str, description: Any) -> None:
        """What a broker says of a topic. Raises TopicMismatch when it was another one before."""
        now, before = str(description.topic_id), self._ids.get(name)
        if before is not None and before != now:
            raise TopicMismatch(
                f"{name} on {self._bootstrap}: was deleted and made again while it was in use (topic id {before}, now "
                f"{now}): its records and the groups' offsets on it are gone, so this run cannot go on; start another "
                "under a new name"
            )
        self._ids[name] = now
        self._absent.pop(name, None)
        partitions, known = len(description.partitions), self._partitions.get(name, 0)
        self._partitions[name] = max(partitions, known)
        if known and partitions > known:
            _log.warning("%s on %s: has %d partitions now, %d before", name, self._bootstrap, partitions, known)
            self._on_growth(name)

    def drop(self, name: str) -> None:
        """This process deletes the topic itself."""
        self._ids.pop(name, None)
        self._partitions.pop(name, None)
        self._asked = {}

    def look(self) -> None:
        """Take in an answer that has come, and ask again every few seconds. Raises TopicMismatch, UnknownTopic."""
        if not self._ids or time.monotonic() < self._next:
            return
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return
            asked, self._asked = self._asked, {}
            self._next = time.monotonic() + _PERIOD_S
            self._take(asked, 0.0)
        else:
            self._asked = self._ask(list(self._ids), _PERIOD_S * 2)

    def verify(self, names: Iterable[str], timeout_s: float) -> None:
        """Ask now, of those that are known already. What does not answer in time is left to ``look``."""
        known = [name for name in names if name in self._ids]
        if known:
            self._take(self._ask(known, timeout_s), timeout_s)

    def _ask(self, names: list[str], timeout_s: float) -> Mapping[str, Future[Any]]:
        found: Mapping[str, Future[Any]] = self._client().describe_topics(
            TopicCollection(names), request_timeout=timeout_s
        )
        return found

    def _take(self, asked: Mapping[str, Future[Any]], timeout_s: float) -> None:
        for name, future in asked.items():
            try:
                self.note(name, future.result(timeout_s + 0.5))
            except TimeoutError:
                continue
            except KafkaException as e:
                if error_of(e).code() not in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID):
                    _log.info("%s on %s: %s", name, self._bootstrap, error_of(e).str())
                    continue
                self._absent[name] += 1
                if self._absent[name] >= _ABSENCES and name in self._ids:
                    raise UnknownTopic(f"{name} on {self._bootstrap}: was deleted while it was in use") from e
