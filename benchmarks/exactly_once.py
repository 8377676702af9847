"""Exactly-once on one broker: the reward operator beside quix-streams and a bare confluent-kafka loop.

``python -m benchmarks.exactly_once [--quick]``. 10 KB records, one partition a worker, each contender a process of its
own: ours is ``laminar operator reward`` as it is deployed. All read the same topic. The rate is taken from outside, by
the offsets that a contender's group has committed; afterwards its outputs are counted. The rounds of the contenders
take turns, and the best of each counts: other load only ever takes away. Latency is that of a record's life from its
producer to a reader of committed outputs, at a tenth of the slowest contender's rate.

Both others do the operator's own work on a record: decode, score, encode, with Laminar's codec. That each of them
only copies the bytes stands beside it, to show what that work costs; no claim is made about it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles

import numpy as np
import yaml
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from benchmarks.claim import Claim, quick_from_arguments, report
from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.tokens import Tokens, ids_buffer
from laminar.streams.broker import Broker
from laminar.streams.deadline import Deadline

QUIX = "quixstreams==3.28.1"
PREFIX = "bench."
SOURCE = f"{PREFIX}trajectories.completed"
TOKENS = 770
"""Of a response: 13 bytes each, so a record has 10 KB."""
ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
ROUND_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One program."""

    name: str
    target: str
    """Its output topic."""
    command: Sequence[str]
    """``{group}`` stands for the consumer group."""
    group: str = "{run}"
    rates: list[float] = field(default_factory=list)
    """Records per second, one a round."""
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The best round's."""
        return max(self.rates)


def trajectories(numbers: range) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of finished trajectories. Token ids and logprobs are noise: they compress badly."""
    codec, rng = Codec(), np.random.default_rng(numbers.start)
    for i in numbers:
        prompt = r.Prompt(
            prompt_id=f"bench/0/{i}",
            dataset="bench",
            epoch=0,
            index=i,
            purpose="train",
            task="bench",
            group_size=1,
            prompt_tokens=ids_buffer([1, 2, 3, 4]),
            n_prompt_tokens=4,
            prompt_text="abcd",
            reference="abcd",
            sampling=r.Sampling(max_tokens=TOKENS),
            seed=i,
            created_ms=0,
        )
        response = Tokens.build(
            ids=rng.integers(0, 150_000, TOKENS).tolist(), logprobs=(-rng.random(TOKENS)).tolist(), version=0
        )
        record = r.CompletedTrajectory(
            trajectory_id=f"bench/0/{i}/0",
            group_id=prompt.prompt_id,
            member=0,
            attempt=0,
            prompt=prompt,
            response=response,
            text="abcd",
            finish="stop",
            rollout_id="rollout-0",
            engine="scripted",
            seed=i,
            version_min=0,
            version_max=0,
            timings=r.Timings(admitted_ms=0, started_ms=0, first_token_ms=0, ended_ms=0),
        )
        yield prompt.prompt_id.encode(), codec.encode(record)


def create_topics(bootstrap: str, names: Sequence[str], partitions: int) -> None:
    """Each with ``partitions``."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    futures = client.create_topics([NewTopic(name, partitions) for name in names])
    for future in futures.values():
        future.result(30.0)


def fill(bootstrap: str, work: Sequence[tuple[bytes, bytes]], partitions: int) -> None:
    """Write the backlog that every round reads."""
    producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "zstd", "linger.ms": 20})
    for i, (key, value) in enumerate(work):
        producer.produce(SOURCE, key=key, value=value, partition=i % partitions)
        if i % 100 == 0:
            producer.flush(60.0)
    if producer.flush(60.0):
        raise SystemExit("the broker did not take the backlog in 60 s")


def laminar_command(folder: Path, bootstrap: str, partitions: int) -> list[str]:
    """``laminar operator reward``, deployed."""
    path = folder / "reward.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "bench",
                "run_dir": str(folder / "run"),
                "steps": 1,
                "groups_per_step": 1,
                "group_size": 1,
                "model": {"path": str(folder)},
                "log": {
                    "kind": "kafka",
                    "bootstrap": bootstrap,
                    "topic_prefix": PREFIX,
                    "partitions": {"trajectories.completed": partitions, "trajectories.scored": partitions},
                },
                "operators": {"reward": {"kind": "reward", "function": "exact", "replicas": 8}},
            }
        )
    )
    laminar = Path(sys.executable).with_name("laminar")
    return [str(laminar), "operator", "reward", str(path), "name={run}", "--instance={index}"]


def quix_python(folder: Path) -> Path:
    """An environment of its own for quix-streams, which asks for an older confluent-kafka."""
    uv, home = str(Path(sys.executable).with_name("uv")), folder / "quix"
    needed = [QUIX, f"numpy=={version('numpy')}", f"fastavro=={version('fastavro')}"]
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), *needed], check=True)
    return home / "bin" / "python"


@contextmanager
def running(contender: Contender, run: str, workers: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The contender's processes."""
    processes = []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (folder / f"{run}.log").open("wb") as log:
        for index in range(workers):
            command = [part.replace("{run}", run).replace("{index}", str(index)) for part in contender.command]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment))
        try:
            yield processes
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(20.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class Offsets:
    """What a group has committed on the source topic, seen from outside."""

    def __init__(self, bootstrap: str, group: str, partitions: int) -> None:
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
        self._partitions = [TopicPartition(SOURCE, p) for p in range(partitions)]

    def total(self) -> int:
        """Records, over all partitions."""
        try:
            return sum(max(0, p.offset) for p in self._consumer.committed(self._partitions, timeout=30.0))
        except KafkaException:  # the group's coordinator is still being made
            return 0

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()


def rate_of(contender: Contender, number: int, *, bootstrap: str, records: int, workers: int, folder: Path) -> float:
    """Records per second of one round: from the first commit that is seen to the last one."""
    run = f"{contender.name.replace(' ', '-')}-{number}"
    offsets = Offsets(bootstrap, contender.group.replace("{run}", run), workers)
    deadline = Deadline.after(START_S + ROUND_S, f"benchmark round {run}")
    with running(contender, run, workers, folder) as processes:
        first: tuple[float, int] | None = None
        while True:
            done, now = offsets.total(), time.perf_counter()
            if first is None and done >= records // 20:
                first = now, done
            if first is not None and done >= records:
                offsets.close()
                return (done - first[1]) / (now - first[0])
            if any(process.poll() is not None for process in processes):
                raise SystemExit(f"{contender.name} ended:\n{(folder / f'{run}.log').read_text()[-3000:]}")
            deadline.check(f"{done} of {records} records")
            time.sleep(0.02)


def count(bootstrap: str, topic: str) -> int:
    """Committed records of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "count",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    partitions = list(consumer.list_topics(topic, timeout=30.0).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    found, ends = 0, 0
    while ends < len(partitions):
        for message in consumer.consume(1000, timeout=10.0):
            ends += message.error() is not None
            found += message.error() is None
    consumer.close()
    return found


def latencies_ms(
    contender: Contender,
    work: Sequence[tuple[bytes, bytes]],
    rate: float,
    *,
    bootstrap: str,
    workers: int,
    folder: Path,
) -> list[float]:
    """From the moment a record is given to its producer to the moment a reader of committed outputs has its result.

    ``rate``: records per second. The first half second is not counted.
    """
    run = f"{contender.name.replace(' ', '-')}-latency"
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{run}-reader",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
            "fetch.queue.backoff.ms": 1,
        }
    )
    partitions = range(workers)
    producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "zstd", "linger.ms": 0})
    offsets = Offsets(bootstrap, contender.group.replace("{run}", run), workers)
    sent: dict[bytes, float] = {}
    found: dict[bytes, float] = {}
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            message = reader.poll(0.05)
            if message is not None and message.error() is None and message.key() in sent:
                found.setdefault(message.key() or b"", time.perf_counter())

    with running(contender, run, workers, folder):
        deadline = Deadline.after(START_S + ROUND_S, f"{run}: the backlog is done")
        backlog = sum(reader.get_watermark_offsets(TopicPartition(SOURCE, p))[1] for p in partitions)
        while offsets.total() < backlog:
            deadline.check()
            time.sleep(0.1)
        ends = {p: reader.get_watermark_offsets(TopicPartition(contender.target, p))[1] for p in partitions}
        reader.assign([TopicPartition(contender.target, p, end) for p, end in ends.items()])
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        start = time.perf_counter()
        for i, (key, value) in enumerate(work):
            time.sleep(max(0.0, start + i / rate - time.perf_counter()))
            sent[key] = time.perf_counter()
            producer.produce(SOURCE, key=key, value=value, partition=i % workers)
            producer.poll(0)
        deadline = Deadline.after(60.0, f"{run}: every output")
        while len(found) < len(sent):
            deadline.check(f"{len(found)} of {len(sent)}")
            time.sleep(0.05)
        stop.set()
        thread.join()
    reader.close()
    offsets.close()
    return [(found[key] - at) * 1e3 for key, at in sent.items() if at > start + 0.5]


def contenders(folder: Path, bootstrap: str, workers: int) -> list[Contender]:
    """Ours first."""
    made = [
        Contender(
            name="laminar",
            target=f"{PREFIX}trajectories.scored",
            command=laminar_command(folder, bootstrap, workers),
            group="{run}.reward",
        )
    ]
    pythons = {"bare": Path(sys.executable), "quix": quix_python(folder)}
    for work in ("score", "copy"):
        for program, python in pythons.items():
            target = f"{PREFIX}{program}.{work}"
            command = [str(python), "-m", f"benchmarks.contender.{program}", bootstrap, SOURCE, target, "{run}", work]
            made.append(Contender(name=f"{program} {work}", target=target, command=command))
    return made


def main() -> None:
    """Measure all."""
    quick = quick_from_arguments(__doc__)
    records, rounds, workers = (8_000, 2, 1) if quick else (30_000, 4, 1)
    work = list(trajectories(range(records)))
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name, Broker(Path(name, "broker"), port=0) as broker:
        folder, bootstrap = Path(name), broker.bootstrap
        all_of_them = contenders(folder, bootstrap, workers)
        create_topics(bootstrap, [SOURCE, *(c.target for c in all_of_them)], workers)
        fill(bootstrap, work, workers)
        for number in range(rounds):
            for contender in all_of_them:
                rate = rate_of(contender, number, bootstrap=bootstrap, records=records, workers=workers, folder=folder)
                contender.rates.append(rate)
                print(f"round {number + 1}: {contender.name:<10} {rate:8.0f} records/s", file=sys.stderr, flush=True)
        for contender in all_of_them:
            found = count(bootstrap, contender.target)
            if found != rounds * records:
                raise SystemExit(f"{contender.name}: {found} outputs of {rounds * records} inputs")
        slow = min(c.rate for c in all_of_them) / 10
        for contender in all_of_them:
            seconds = 6 if quick else 20
            some = list(trajectories(range(records, records + int(slow * seconds))))
            contender.latencies_ms.extend(
                latencies_ms(contender, some, slow, bootstrap=bootstrap, workers=workers, folder=folder)
            )
    ours, bare, quix, *_ = all_of_them
    report(
        f"Exactly-once, {len(work[0][1])} byte records, {workers} worker, latency at {slow:.0f} records/s",
        ["", "records/s", "MB/s", "p50 ms", "p99 ms"],
        [
            [
                c.name,
                round(c.rate),
                round(c.rate * len(work[0][1]) / 1e6, 1),
                quantiles(c.latencies_ms, n=100)[49],
                quantiles(c.latencies_ms, n=100)[98],
            ]
            for c in all_of_them
        ],
        [
            Claim(name="exactly_once.quix", ratio=ours.rate / quix.rate, goal=2.0, unit="x", lower_is_better=False),
            Claim(name="exactly_once.bare", ratio=ours.rate / bare.rate, goal=0.9, unit="x", lower_is_better=False),
        ],
    )


if __name__ == "__main__":
    main()
