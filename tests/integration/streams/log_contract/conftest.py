"""One suite, every adapter. An adapter joins by a fixture ``{name}_handles`` that returns a Handles."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from laminar.streams.log import Log, TopicSpec
from laminar.streams.memory import MemoryBroker, MemoryLog
from laminar.streams.meter import Meter
from laminar.streams.metered import MeteredLog
from laminar.streams.namespace import NamespacedLog
from laminar.streams.sqlite import SqliteLog

SESSION_S = 1.0


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Handles:
    """How the suite gets at an adapter."""

    open: Callable[[], Log]
    """A further independent handle of the same log, as another process would have it."""
    maintain: Callable[[Log, float], None] = _nothing
    """Run retention and compaction as of this time (Unix epoch seconds), where the adapter does not by itself."""
    vanish: Callable[[Any], None] = _nothing
    """Make this consumer die without a word. Nothing to do where not polling means that."""
    replaces_instances: bool = True
    """Whether a new member of an instance takes the place of the old one, also while that one is alive."""


@pytest.fixture
def memory_handles() -> Handles:
    broker = MemoryBroker(time.time)
    return Handles(
        open=lambda: MemoryLog(broker=broker, session_timeout_s=SESSION_S),
        maintain=lambda log, now: log.maintain(now),  # type: ignore[attr-defined]
    )


@pytest.fixture
def sqlite_handles(tmp_path: Path) -> Handles:
    return Handles(
        open=lambda: SqliteLog(tmp_path / "log", session_timeout_s=SESSION_S),
        maintain=lambda log, now: log.maintain(now),  # type: ignore[attr-defined]
    )


@pytest.fixture
def namespaced_handles(memory_handles: Handles) -> Handles:
    return Handles(
        open=lambda: NamespacedLog(memory_handles.open(), "run."),
        maintain=lambda log, now: memory_handles.maintain(log._log, now),  # type: ignore[attr-defined]
    )


@pytest.fixture
def metered_handles(memory_handles: Handles) -> Handles:
    return Handles(
        open=lambda: MeteredLog(memory_handles.open(), Meter()),
        maintain=lambda log, now: memory_handles.maintain(log._log, now),  # type: ignore[attr-defined]
    )


@pytest.fixture(params=["memory", "namespaced", "metered", "sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def handles(request: pytest.FixtureRequest) -> Handles:
    found: Handles = request.getfixturevalue(f"{request.param}_handles")
    return found


@pytest.fixture
def open_log(handles: Handles) -> Iterator[Callable[[], Log]]:
    """Opens a further independent handle of the same log; all are closed at the end."""
    opened: list[Log] = []

    def open_one() -> Log:
        opened.append(handles.open())
        return opened[-1]

    yield open_one
    for log in reversed(opened):
        log.close()


@pytest.fixture
def log(open_log: Callable[[], Log]) -> Log:
    """The first handle."""
    return open_log()


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Names that no other test uses: adapters may share one broker over the whole session."""
    tag = uuid.uuid4().hex[:8]
    return lambda name: f"{name}-{tag}"


@pytest.fixture
def topic(log: Log, unique: Callable[[str], str]) -> str:
    """A topic of two partitions."""
    name = unique("topic")
    log.create_topics([TopicSpec(name=name, partitions=2)])
    return name


@pytest.fixture
def single(log: Log, unique: Callable[[str], str]) -> str:
    """A topic of one partition."""
    name = unique("single")
    log.create_topics([TopicSpec(name=name, partitions=1)])
    return name
