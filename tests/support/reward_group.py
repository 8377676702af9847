"""A group of reward processes on the real broker, and what they have written."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import TopicPartition
from laminar.streams.reading import read_topic
from laminar.streams.topics import outgoing, topic_specs
from tests.support import reward_process, sample

__all__ = ["RewardGroup", "RewardProcess", "reward_topics", "trajectories"]

IN, OUT, DEAD = "trajectories.completed", "trajectories.scored", "dead.letters"
WAIT_S = 60.0
CODEC = Codec()


class RewardProcess:
    """One process; ``events`` are what it has said so far."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.instance = settings["instance"]
        self.events: list[dict[str, Any]] = []
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        command = [sys.executable, "-m", reward_process.__name__, json.dumps(settings)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._queue.put(json.loads(line))

    def hear(self) -> list[dict[str, Any]]:
        """All events up to now."""
        while not self._queue.empty():
            self.events.append(self._queue.get())
        return self.events

    def wait_for(self, event: str) -> dict[str, Any]:
        deadline = Deadline.after(WAIT_S, f"{self.instance} says {event}")
        while not (found := [x for x in self.hear() if x["event"] == event]):
            deadline.check(str(self.events))
            time.sleep(0.01)
        return found[-1]

    @property
    def owned(self) -> set[int]:
        """Its partitions, as it says."""
        owned: set[int] = set()
        for event in self.hear():
            if event["event"] == "assigned":
                owned |= set(event["partitions"])
            elif event["event"] == "revoked":
                owned -= set(event["partitions"])
        return owned

    def send(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.send(number)
        code = self.popen.wait(WAIT_S)
        self.close()
        return code

    def close(self) -> None:
        """Kill it, if it lives."""
        self.popen.kill()
        self.popen.wait()
        self._thread.join(5.0)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class RewardGroup:
    """Processes of one group over one topic."""

    def __init__(self, log: KafkaLog, settings: dict[str, Any]) -> None:
        self.log = log
        self.run: str = settings["run"]
        self.processes: dict[str, RewardProcess] = {}
        """The newest of each instance."""
        self._started: list[RewardProcess] = []
        self._settings = settings

    def start(self, *instances: str, **changes: Any) -> None:
        for instance in instances:
            self.processes[instance] = RewardProcess({**self._settings, "instance": instance, **changes})
            self._started.append(self.processes[instance])

    def __getitem__(self, instance: str) -> RewardProcess:
        return self.processes[instance]

    def write(self, records: Sequence[r.Record], partitions: int, by: str) -> None:
        with self.log.producer(by).transaction() as tx:
            for index, record in enumerate(records):
                tx.send(outgoing(CODEC, record, partition=index % partitions))

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        deadline = Deadline.after(timeout_s, what)
        while not condition():
            deadline.check(str({name: sorted(p.owned) for name, p in self.processes.items()}))
            time.sleep(0.02)

    def wait_until_done(self, timeout_s: float = WAIT_S) -> None:
        deadline = Deadline.after(timeout_s, "the lag reaches 0")
        while any(self.lag().values()):
            deadline.check(str(self.lag()) + str({name: p.hear()[-4:] for name, p in self.processes.items()}))
            time.sleep(0.1)

    def lag(self) -> dict[TopicPartition, int]:
        return self.log.lag(f"{self.run}.reward", IN)

    def scored(self) -> Counter[str]:
        """How often each trajectory was scored."""
        found = [CODEC.decode(x.value or b"") for x in read_topic(self.log, OUT, Deadline.after(WAIT_S, "read"))]
        return Counter(x.trajectory.trajectory_id for x in found if isinstance(x, r.ScoredTrajectory))

    def close(self) -> None:
        for process in self._started:
            process.close()


@contextmanager
def reward_topics(log: KafkaLog, partitions: int) -> Iterator[None]:
    """The reward operator's topics, for one test alone."""
    specs = [s for s in topic_specs({IN: partitions, OUT: 2}) if s.name in (IN, OUT, DEAD)]
    log.create_topics(specs)
    try:
        yield
    finally:
        for spec in specs:
            log.delete_topic(spec.name)


def trajectories(count: int, start: int = 0) -> list[r.CompletedTrajectory]:
    """That many different ones."""
    return [sample.completed(sample.prompt(start + i)) for i in range(count)]
