"""kill -9 against the processes that share a SQLite log."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from laminar.streams.deadline import Deadline
from laminar.streams.log import Log, TopicSpec
from laminar.streams.reading import read_topic
from laminar.streams.sqlite import SqliteLog
from tests.chaos import sqlite_worker
from tests.chaos.sqlite_worker import BATCH, payload

TOTAL = 3000
KILLS = 8
COPIERS = 3


def _start(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", sqlite_worker.__name__, *args])


def _numbers(log: Log, topic: str) -> Counter[bytes | None]:
    return Counter(r.value for r in read_topic(log, topic, Deadline.after(30, f"read {topic}")))


def test_every_record_is_there_exactly_once_after_kills_at_any_point(tmp_path: Path) -> None:
    rng = random.Random(0)
    log = SqliteLog(tmp_path)
    log.create_topics(
        [
            TopicSpec(name="in", partitions=6),
            TopicSpec(name="out", partitions=3),
            TopicSpec(name="index", partitions=1),
        ]
    )
    generation = 0

    def feeder() -> subprocess.Popen[bytes]:
        return _start("feed", str(tmp_path), str(TOTAL))

    def copier(slot: int) -> subprocess.Popen[bytes]:
        # Slot 0 comes back under its name; the others come back as strangers, so that their session has to end.
        name = "copy-0" if slot == 0 else f"copy-{slot}-{generation}"
        return _start("copy", str(tmp_path), name, f"copy-{slot}")

    processes = [feeder(), *(copier(slot) for slot in range(COPIERS))]
    try:
        deadline = Deadline.after(240, "everything is copied")
        while processes[0].poll() is None:
            deadline.check(f"{generation} kills")
            # Ever rarer: where processes start slowly, work must get on between two kills.
            time.sleep(rng.uniform(0.1, 0.5) * max(1.0, generation / KILLS))
            slot = rng.randrange(COPIERS + 1)
            processes[slot].kill()
            code = processes[slot].wait()
            if slot == 0 and code == 0:
                break
            assert code == -signal.SIGKILL
            generation += 1
            processes[slot] = feeder() if slot == 0 else copier(slot - 1)
        assert processes[0].wait() == 0
        assert generation >= KILLS
        while sum(log.lag("copy", "in").values()):
            deadline.check(f"lag {log.lag('copy', 'in')}")
            time.sleep(0.05)
        assert [p.poll() for p in processes[1:]] == [None] * COPIERS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    expected = Counter({payload(number): 1 for number in range(TOTAL)})
    assert _numbers(log, "in") == expected
    assert _numbers(log, "index") == Counter({str(n).encode(): 1 for n in range(0, TOTAL, BATCH)})
    assert _numbers(log, "out") == expected
    log.close()
