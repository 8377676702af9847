"""What a slow consumer of a large backlog costs in memory (case S13).

``python -m benchmarks.backlog [--quick]``. A real broker, a topic full of records of 1 MB (and then of 10 KB) that
compress about twenty to one (the last: five hundred to one), and a process with the exactly-once loop whose function is
slow. Its resident memory is read while it works; the claim is the growth over what the same process has before it has
read anything, in megabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.claim import Claim, quick_from_arguments, report
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.tokens import Tokens, ids_buffer
from laminar.streams.broker import Broker
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import OutRecord
from laminar.streams.loop import Loop
from laminar.streams.topics import outgoing, topic_specs
from laminar.streams.worker import Inline

__all__ = ["Growth", "measure"]

IN, OUT, DEAD = "trajectories.completed", "trajectories.scored", "dead.letters"
PARTITIONS = 4
MB = 1_000_000
CASES = (("1 MB", MB, 0.05, 50), ("10 KB", 10_000, 0.001, 200), ("10 KB all alike", 10_000, 0.001, 1))
"""Name, bytes, seconds for each, how many are different."""
BUDGET_MB = 256.0
"""Three times ``max_in_hand_bytes``, and what the client may hold ahead: see ``laminar.streams.kafka.settings``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one reading came to."""

    backlog_mb: float
    on_disk_mb: float
    write_s: float
    before_mb: float
    peak_mb: float
    read: int

    @property
    def mb(self) -> float:
        """Resident memory over that before the first record."""
        return self.peak_mb - self.before_mb


def trajectory(value_bytes: int) -> OutRecord:
    """A finished trajectory of about that size; a tenth of its text is noise."""
    noise = os.urandom(value_bytes // 20).hex()
    text = "".join(noise[i : i + 100] + "z" * 900 for i in range(0, len(noise), 100))[:value_bytes]
    prompt = r.Prompt(
        prompt_id="backlog/0/0",
        dataset="backlog",
        epoch=0,
        index=0,
        purpose="train",
        task="backlog",
        group_size=1,
        prompt_tokens=ids_buffer([1]),
        n_prompt_tokens=1,
        prompt_text="",
        reference="",
        sampling=r.Sampling(max_tokens=8),
        seed=0,
        created_ms=0,
    )
    made = r.CompletedTrajectory(
        trajectory_id="backlog/0/0/0",
        group_id=prompt.prompt_id,
        member=0,
        attempt=0,
        prompt=prompt,
        response=Tokens.build(ids=[1], logprobs=[-0.5], version=0),
        text=text,
        finish="stop",
        rollout_id="rollout-0",
        engine="backlog",
        seed=0,
        version_min=0,
        version_max=0,
        timings=r.Timings(admitted_ms=0, started_ms=0, first_token_ms=0, ended_ms=0),
        meta={},
    )
    return outgoing(Codec(), made)


def fill(log: KafkaLog, value_bytes: int, total_mb: float, different: int) -> float:
    """Seconds."""
    records = [trajectory(value_bytes) for _ in range(different)]
    size = len(records[0].value or b"")
    producer = log.producer(f"fill-{uuid.uuid4().hex[:6]}")
    start, count, per_batch = time.perf_counter(), int(total_mb * MB / size), max(1, 64 * MB // size)
    sent = 0
    while sent < count:
        with producer.transaction(120.0) as tx:
            for index in range(sent, min(count, sent + per_batch)):
                tx.send(replace(records[index // PARTITIONS % different], partition=index % PARTITIONS))
        sent += per_batch
    return time.perf_counter() - start


def read_slowly(bootstrap: str, seconds: float, pause_s: float) -> None:
    """The process that is measured. Says before, peak (MB) and records on stdout."""

    def slow(record: r.Record) -> list[r.Record]:
        time.sleep(pause_s)
        assert isinstance(record, r.CompletedTrajectory)
        return []

    loop = Loop(
        log=KafkaLog(bootstrap),
        codec=Codec(),
        name="slow",
        group=f"slow-{uuid.uuid4().hex[:6]}",
        instance="slow-0",
        transactional_id=f"slow-{uuid.uuid4().hex[:6]}",
        topics=[IN],
        worker=Inline(slow, calls_per_step=1),
        max_in_hand=1000,
    )
    before = peak = resident_mb()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        loop.step(time.time())
        peak = max(peak, resident_mb())
    print(json.dumps({"before": before, "peak": peak, "read": loop.counts.records}), flush=True)
    loop.close()


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def measure(
    bootstrap: str,
    data: Path,
    *,
    value_bytes: int,
    total_mb: float,
    seconds: float,
    pause_s: float,
    different: int = 200,
) -> Growth:
    """Fill the topic (made here and deleted again), and read it slowly.

    ``data``: the broker's folder. ``different``: the records repeat after so many; when all are the same, a batch of
    small ones compresses to almost nothing.
    """
    log = KafkaLog(bootstrap, request_timeout_s=120.0, transaction_timeout_s=300.0)
    specs = [s for s in topic_specs({IN: PARTITIONS, OUT: 1}) if s.name in (IN, OUT, DEAD)]
    log.create_topics(specs)
    try:
        write_s = fill(log, value_bytes, total_mb, different)
        folders = [p for p in data.rglob(f"{IN}-*") if not p.name.endswith("-delete")]
        on_disk = sum(f.stat().st_size for p in folders for f in p.glob("*.log")) / MB
        told = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--read", bootstrap, str(seconds), str(pause_s)],
            check=True,
            capture_output=True,
            text=True,
            timeout=seconds + 120.0,
        )
        found = json.loads(told.stdout.splitlines()[-1])
        return Growth(
            backlog_mb=total_mb,
            on_disk_mb=on_disk,
            write_s=write_s,
            before_mb=found["before"],
            peak_mb=found["peak"],
            read=found["read"],
        )
    finally:
        for spec in specs:
            log.delete_topic(spec.name)
        log.close()


def main() -> None:
    """Measure both sizes."""
    quick = quick_from_arguments(__doc__)
    total_mb, seconds = (300.0, 8.0) if quick else (10_000.0, 40.0)
    rows: list[list[object]] = []
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        broker = Broker(Path(folder), port=0, heap_mb=1024)
        with broker:
            for name, value_bytes, pause_s, different in CASES:
                found = measure(
                    broker.bootstrap,
                    Path(folder),
                    value_bytes=value_bytes,
                    total_mb=total_mb,
                    seconds=seconds,
                    pause_s=pause_s,
                    different=different,
                )
                rows.append(
                    [
                        name,
                        found.backlog_mb,
                        found.on_disk_mb,
                        found.write_s,
                        found.read,
                        found.before_mb,
                        found.peak_mb,
                    ]
                )
                if different == 1:
                    continue
                claims.append(
                    Claim(
                        name=f"backlog.growth.{name.replace(' ', '').lower()}",
                        ratio=found.mb,
                        goal=BUDGET_MB,
                        unit="MB",
                        lower_is_better=True,
                    )
                )
    report(
        "A slow exactly-once consumer of a backlog",
        ["records", "backlog MB", "on disk MB", "write s", "read", "before MB", "peak MB"],
        rows,
        claims,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read_slowly(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
