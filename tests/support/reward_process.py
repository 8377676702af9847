"""A process that runs the reward operator on a real broker, for tests that kill, stop and restart it.

``python -m tests.support.reward_process JSON``: ``bootstrap``, ``run``, ``instance``, ``group_protocol``, ``reward``
(settings of the operator), ``log`` (settings of the log), ``stall_s``: in its first transaction it waits for so long,
between what it has sent and its commit. Topics have no prefix. It says on stdout, one JSON line each: ``assigned`` and
``revoked`` with partitions, ``stalling``; and on SIGTERM it drains and ends with 0, as under the runner.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.operator import build
from laminar.pipeline.exit_code import exit_code_of
from laminar.schemas.codec import Codec
from laminar.schemas.errors import LaminarError
from laminar.streams.kafka import KafkaLog
from laminar.streams.log import Consumer, Producer, RebalanceCallback, TopicPartition, Transaction


def say(event: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")
    sys.stdout.flush()


class Talking:
    """The log, telling of rebalances and stalling once."""

    def __init__(self, log: KafkaLog, stall_s: float) -> None:
        self._log = log
        self._stall_s = stall_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        instance: str | None = None,
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
    ) -> Consumer:
        def assigned(partitions: frozenset[TopicPartition]) -> None:
            say("assigned", partitions=sorted(p.partition for p in partitions))
            if on_assign is not None:
                on_assign(partitions)

        def revoked(partitions: frozenset[TopicPartition]) -> None:
            say("revoked", partitions=sorted(p.partition for p in partitions))
            if on_revoke is not None:
                on_revoke(partitions)

        return self._log.consumer(group, topics, instance=instance, on_assign=assigned, on_revoke=revoked)

    def producer(self, transactional_id: str) -> Producer:
        stall_s, self._stall_s = self._stall_s, 0.0
        made = self._log.producer(transactional_id)
        return Stalling(made, stall_s) if stall_s else made


class Stalling:
    """A producer whose first transaction stalls before its commit."""

    def __init__(self, producer: Any, stall_s: float) -> None:
        self._producer = producer
        self._stall_s = stall_s

    @contextmanager
    def transaction(self, timeout_s: float | None = None, *, visible: bool = True) -> Iterator[Transaction]:
        with self._producer.transaction(timeout_s, visible=visible) as transaction:
            yield transaction
            if self._stall_s:
                self._producer._client.flush(10.0)  # what was sent stands on the broker, uncommitted
                say("stalling")
                time.sleep(self._stall_s)
                self._stall_s = 0.0

    def close(self) -> None:
        self._producer.close()


def main() -> int:
    given = json.loads(sys.argv[1])
    log = Talking(
        KafkaLog(given["bootstrap"], group_protocol=given["group_protocol"], **given.get("log", {})),
        given.get("stall_s", 0.0),
    )
    run = RunInfo(
        run_id=given["run"],
        run_dir=Path("."),
        steps=1,
        groups_per_step=1,
        group_size=1,
        max_staleness=None,
        seed=0,
        model=ModelConfig(path=Path("model")),
    )
    context = Context(run=run, name="reward", instance=given["instance"], log=log, codec=Codec())
    stopping: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        loop = build(RewardConfig(**given.get("reward", {})), context)
        say("started")
        while not stopping:
            if not loop.step(time.time()):
                time.sleep(0.005)
        deadline = time.monotonic() + 20.0
        while not loop.drain(time.time()) and time.monotonic() < deadline:
            time.sleep(0.005)
        loop.close()
    except LaminarError as error:
        say("failed", kind=type(error).__name__, error=str(error))
        return exit_code_of(error)
    say("ended", counts=loop.counts.records)
    return 0


__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
