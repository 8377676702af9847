"""Four processes share 32 partitions under load; some join, some leave, one is restarted, one is killed.

``python -m benchmarks.rebalance [--quick]``. Each process runs the exactly-once loop on the real broker; a feeder
writes at a steady rate to all partitions. After each change the group is watched until its assignment stands still.
Printed for each change: rounds (how often one of those that stay was given, or had to give up, something, at most),
partitions that moved away from them, and the longest pause: the longest that any record written around the change had
to wait for its output, beside the median wait of the whole run. In the end every record has exactly one output.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.claim import Claim, quick_from_arguments, report
from laminar.schemas.codec import Codec
from laminar.schemas.records import DrainCommand
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import Consumer, OutRecord, RebalanceCallback, TopicPartition, TopicSpec
from laminar.streams.loop import Loop
from laminar.streams.reading import read_topic
from laminar.streams.worker import Inline

__all__ = ["Change", "Result", "measure"]

Protocol = Literal["consumer", "classic"]
PARTITIONS = 32
WORKERS = 4
RATE = 200
"""Records per second, all partitions together."""
STILL_S = 1.5
"""An assignment that has stood still for so long is stable."""
WAIT_S = 90.0


@dataclass(slots=True, kw_only=True)
class Change:
    """One change of the group's members."""

    name: str
    at: float
    """Unix epoch seconds, as ``until``."""
    until: float = 0.0
    changes: int = 1
    """Of the group's members: a restart is two of them where a member that leaves is gone at once."""
    rounds: int = 0
    moved: int = 0
    pause_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Result:
    """What a run came to."""

    changes: list[Change] = field(default_factory=list)
    records: int = 0
    lost: int = 0
    doubled: int = 0
    median_s: float = 0.0


class Member:
    """One process and what it owns, as it says."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.said: list[tuple[float, str, tuple[int, ...]]] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        command = [sys.executable, "-m", "benchmarks.rebalance", "--member", json.dumps(settings)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self.popen.stdout or ():
            self._queue.put(line)

    def hear(self) -> None:
        while not self._queue.empty():
            at, sign, partitions = json.loads(self._queue.get())
            if partitions:
                self.said.append((at, sign, tuple(partitions)))

    @property
    def owned(self) -> set[int]:
        owned: set[int] = set()
        for _, sign, partitions in self.said:
            owned = owned | set(partitions) if sign == "+" else owned - set(partitions)
        return owned

    def end(self, number: int) -> None:
        self.popen.send_signal(number)
        self.popen.wait(WAIT_S)
        self._thread.join(5.0)
        if self.popen.stdout is not None:
            self.popen.stdout.close()


class Feeder(threading.Thread):
    """Writes to all partitions at a steady rate, until told to stop."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.sent = 0
        self._log = KafkaLog(bootstrap)
        self._producer = self._log.producer(f"feeder-{topic}")
        self._topic = topic
        self._codec = Codec()

    def run(self) -> None:
        start = time.monotonic()
        while not self.stopped.is_set():
            due = int((time.monotonic() - start) * RATE) - self.sent
            if due > 0:
                with self._producer.transaction() as tx:
                    for _ in range(due):
                        value = self._codec.encode(
                            DrainCommand(rollout_id="rollout-0", incarnation=self.sent, at_ms=int(time.time() * 1000))
                        )
                        tx.send(OutRecord(topic=self._topic, key=None, value=value, partition=self.sent % PARTITIONS))
                        self.sent += 1
            time.sleep(0.02)
        self._log.close()


class Trial:
    """One group protocol."""

    def __init__(self, bootstrap: str, protocol: Protocol, session_s: float) -> None:
        tag = uuid.uuid4().hex[:6]
        self.source, self.target = f"in-{tag}", "rollouts.commands"
        self.log = KafkaLog(bootstrap)
        self.log.create_topics(
            [
                TopicSpec(name=self.source, partitions=PARTITIONS),
                TopicSpec(name=self.target, partitions=1),
                TopicSpec(name="dead.letters", partitions=1),
            ]
        )
        self._settings = {
            "bootstrap": bootstrap,
            "protocol": protocol,
            "session_s": session_s,
            "source": self.source,
            "group": f"group-{tag}",
        }
        self._static = protocol == "consumer"
        self.members: dict[str, Member] = {}
        self.result = Result()
        self.feeder = Feeder(bootstrap, self.source)

    def start(self, *names: str) -> None:
        for name in names:
            self.members[name] = Member({**self._settings, "instance": name})

    def end(self, name: str, number: int) -> None:
        self.members.pop(name).end(number)

    def settle(self, name: str, at: float, *, changes: int = 1) -> None:
        """Wait until all partitions are owned once, and nothing has moved for a while."""
        deadline = Deadline.after(WAIT_S, f"{name}: the group is stable")
        while True:
            deadline.check(str({n: sorted(m.owned) for n, m in self.members.items()}))
            for member in self.members.values():
                member.hear()
            owned = sorted(p for m in self.members.values() for p in m.owned)
            last = max((said[0] for m in self.members.values() for said in m.said), default=0.0)
            spread = owned == list(range(PARTITIONS)) and all(m.owned for m in self.members.values())
            if spread and time.time() - max(last, at) > STILL_S:
                break
            time.sleep(0.05)
        change = Change(name=name, at=at, until=max(last, at), changes=changes)
        for member in self.members.values():
            if member.said[0][0] < at:
                since = [said for said in member.said if said[0] >= at]
                change.rounds = max(change.rounds, len(since))
                change.moved += sum(len(said[2]) for said in since if said[1] == "-")
        self.result.changes.append(change)

    def run(self, *, full: bool) -> Result:
        """Join, leave, restart, kill."""
        names = [f"w-{i}" for i in range(WORKERS)]
        try:
            self.start(*names[:-1])
            self.settle("three start", time.time())
            self.result.changes.clear()
            self.feeder.start()
            time.sleep(STILL_S)
            at = time.time()
            self.start(names[-1])
            self.settle("a fourth joins", at)
            at = time.time()
            self.end("w-1", signal.SIGTERM)
            self.start("w-1")
            self.settle("one restarts", at, changes=1 if self._static else 2)
            if full:
                at = time.time()
                self.end("w-2", signal.SIGKILL)
                self.start("w-2")
                self.settle("one is killed and restarts", at, changes=2)
                at = time.time()
                self.end("w-3", signal.SIGTERM)
                self.settle("one leaves for good", at)
            self.feeder.stopped.set()
            self.feeder.join(WAIT_S)
            self._judge()
        finally:
            self.feeder.stopped.set()
            for name in list(self.members):
                self.end(name, signal.SIGKILL)
            for topic in (self.source, self.target, "dead.letters"):
                self.log.delete_topic(topic)
            self.log.close()
        return self.result

    def _judge(self) -> None:
        deadline, codec = Deadline.after(WAIT_S, "everything has its output"), Codec()
        while any(self.log.lag(self._settings["group"], self.source).values()):  # type: ignore[arg-type]
            deadline.check()
            time.sleep(0.1)
        outputs: Counter[int] = Counter()
        waits: list[tuple[float, float]] = []
        """Written at, waited for."""
        for record in read_topic(self.log, self.target, deadline):
            made = codec.decode(record.value or b"")
            assert isinstance(made, DrainCommand)
            outputs[made.incarnation] += 1
            waits.append((made.at_ms / 1000, (record.timestamp_ms - made.at_ms) / 1000))
        result = self.result
        result.records = self.feeder.sent
        result.lost = sum(1 for i in range(self.feeder.sent) if not outputs[i])
        result.doubled = sum(1 for count in outputs.values() if count > 1)
        result.median_s = median(wait for _, wait in waits)
        for change in result.changes:
            around = [wait for at, wait in waits if change.at - 2.0 <= at <= change.until + 1.0]
            change.pause_s = max(around, default=0.0)


def measure(bootstrap: str, protocol: Protocol, *, full: bool, session_s: float) -> Result:
    """One trial. ``session_s``: of the classic protocol's members."""
    return Trial(bootstrap, protocol, session_s).run(full=full)


class Watched:
    """The log; its consumers say what they are given and what they give up."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,  # noqa: ARG002 - the loop has none
        on_revoke: RebalanceCallback | None = None,
    ) -> Consumer:
        """See Log.consumer."""

        def assigned(partitions: frozenset[TopicPartition]) -> None:
            self._say("+", partitions)

        def revoked(partitions: frozenset[TopicPartition]) -> None:
            if on_revoke is not None:
                on_revoke(partitions)
            self._say("-", partitions)

        return self._log.consumer(group, topics, instance=instance, on_assign=assigned, on_revoke=revoked)

    def _say(self, sign: str, partitions: frozenset[TopicPartition]) -> None:
        print(json.dumps([time.time(), sign, sorted(p.partition for p in partitions)]), flush=True)


def member(settings: dict[str, Any]) -> None:
    """A process of the group: copies commands."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    handle = KafkaLog(
        settings["bootstrap"], group_protocol=settings["protocol"], session_timeout_s=settings["session_s"]
    )
    loop = Loop(
        log=Watched(handle),
        codec=Codec(),
        name="copy",
        group=settings["group"],
        instance=settings["instance"],
        transactional_id=f"{settings['group']}.{settings['instance']}",
        topics=[settings["source"]],
        worker=Inline(lambda record: [record]),
        max_in_hand=256,
    )
    while not stopping:
        if not loop.step(time.time()):
            time.sleep(0.002)
    while not loop.drain(time.time()):
        time.sleep(0.002)
    loop.close()


def main() -> None:
    """Both protocols."""
    quick = quick_from_arguments(__doc__)
    rows: list[list[object]] = []
    claims: list[Claim] = []
    protocols: tuple[Protocol, ...] = ("consumer", "classic")
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        broker = Broker(Path(folder), port=0, session_timeout_s=6.0)
        with broker:
            for protocol in protocols:
                found = measure(broker.bootstrap, protocol, full=not quick, session_s=6.0)
                rows += [[protocol, c.name, c.rounds, c.moved, c.until - c.at, c.pause_s] for c in found.changes]
                rows.append([protocol, "the whole run: median wait", "", "", "", found.median_s])
                most = max(change.rounds / change.changes for change in found.changes)
                claims += [
                    Claim(name=f"rebalance.{protocol}.rounds", ratio=most, goal=2, unit="rounds", lower_is_better=True),
                    Claim(
                        name=f"rebalance.{protocol}.lost_or_doubled",
                        ratio=found.lost + found.doubled,
                        goal=0,
                        unit="records",
                        lower_is_better=True,
                    ),
                ]
    report(
        f"{WORKERS} processes, {PARTITIONS} partitions, {RATE} records/s",
        ["protocol", "change", "rounds", "moved", "stable after s", "longest pause s"],
        rows,
        claims,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        member(json.loads(sys.argv[2]))
    else:
        main()
