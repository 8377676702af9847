"""Relays, a publisher and sources over one memory log in this process: real shared memory, real HTTP."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.relay.config import RelayConfig
from laminar.operators.relay.operator import RelayOperator
from laminar.operators.relay.publisher import RelayPublisher
from laminar.operators.relay.source import RelaySource
from laminar.operators.weights import NamedTensor, TensorView
from laminar.schemas.codec import Codec
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline
from laminar.streams.log import Log
from laminar.streams.memory.log import MemoryLog
from laminar.streams.topics import outgoing, topic_specs
from tests.support.proxy import Proxy

__all__ = ["RelayRun", "arrays", "far", "named", "relay_run", "soon", "values_of"]


def arrays(version: int, *, n: int = 4, size: int = 5000) -> dict[str, np.ndarray]:
    """Tensors whose every value tells their version."""
    return {f"layer.{i}.weight": np.full(size, version * 1000 + i, np.float32) for i in range(n)}


def named(tensors: Mapping[str, np.ndarray]) -> list[NamedTensor]:
    """The same, to publish."""
    return [
        NamedTensor(name=name, dtype="F32", shape=a.shape, data=memoryview(a).cast("B")) for name, a in tensors.items()
    ]


def values_of(views: Mapping[str, TensorView]) -> dict[str, set[float]]:
    """The distinct values of each tensor."""
    return {name: set(np.unique(np.frombuffer(v.data, np.float32)).tolist()) for name, v in views.items()}


def soon(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Wait until the condition holds."""
    deadline = Deadline.after(seconds, what)
    while not condition():
        deadline.check()
        time.sleep(0.005)


class RelayRun:
    """A run that consists of relays only."""

    def __init__(self, tmp: Path, shm: Path, log: Log | None = None) -> None:
        self.tmp = tmp
        self.shm = shm
        self.log = log if log is not None else MemoryLog()
        self.log.create_topics(topic_specs())
        self.codec = Codec()
        self._stops: dict[RelayOperator, Callable[[bool], None]] = {}
        self._closers: list[Callable[[], None]] = []

    def context(self, instance: str) -> Context:
        """What the runner would hand to this process."""
        run = RunInfo(
            run_id="run",
            run_dir=self.tmp / "run",
            steps=1,
            groups_per_step=1,
            group_size=1,
            max_staleness=None,
            seed=0,
            model=ModelConfig(path=self.tmp / "model"),
        )
        return Context(run=run, name=instance.split("-")[0], instance=instance, log=self.log, codec=self.codec)

    def config(self, **settings: object) -> RelayConfig:
        """Quick settings, a small chunk."""
        quick: dict[str, object] = {
            "shm_root": self.shm,
            "chunk_bytes": 4096,
            "heartbeat_s": 0.05,
            "dead_after_s": 1.0,
            "read_timeout_s": 2.0,
            "stall_timeout_s": 1.0,
        }
        return RelayConfig.model_validate({**quick, **settings})

    def relay(self, index: int = 0, *, run: bool = True, **settings: object) -> RelayOperator:
        """A relay; ``run`` steps it in a thread until it is stopped."""
        operator = RelayOperator(self.config(**settings), self.context(f"relay-{index}"))
        stop = threading.Event()

        def loop() -> None:
            try:
                while not stop.is_set():
                    if not operator.step(time.time()):
                        stop.wait(0.005)
            except BaseException:
                logging.getLogger(__name__).exception("relay-%d ended", index)
                raise

        thread = threading.Thread(target=loop, daemon=True)

        def end(drain: bool) -> None:
            stop.set()
            if run:
                thread.join()
            if drain:
                operator.drain(time.time())
            operator.close()

        if run:
            thread.start()
        else:
            operator.step(time.time())
        self._stops[operator] = end
        return operator

    def stop(self, operator: RelayOperator, *, drain: bool = False) -> None:
        """End a relay; without ``drain`` as a crash would, except that its threads end too."""
        self._stops.pop(operator)(drain)

    def publisher(self) -> RelayPublisher:
        """A trainer's publisher."""
        publisher = RelayPublisher.from_context(self.context("trainer-0"))
        self._closers.append(publisher.close)
        return publisher

    def source(self, **settings: object) -> RelaySource:
        """A rollout's source."""
        context = self.context("rollout-0")
        from_context = RelaySource.from_context(context)
        self._closers.append(from_context.close)
        if not settings:
            return from_context
        source = RelaySource(context, token=from_context.token, **settings)  # type: ignore[arg-type]
        self._closers.append(source.close)
        return source

    def write(self, record: VersionManifest | RelayStatus) -> None:
        """Put a record on its topic, as the trainer (or a relay) would."""
        with self.log.producer("run.trainer-0").transaction() as tx:
            tx.send(outgoing(self.codec, record))

    def publish(
        self, publisher: RelayPublisher, version: int, *, epoch: int = 0, n: int = 4, size: int = 5000
    ) -> VersionManifest:
        """Stage, announce, seal, announce."""
        prepared = publisher.stage(
            named(arrays(version, n=n, size=size)),
            tied={},
            epoch=epoch,
            version=version,
            parent=version - 1,
            step=version,
            deadline=Deadline.after(20, f"stage version {version}"),
        )
        self.write(prepared)
        committed = publisher.seal(prepared, Deadline.after(20, f"seal version {version}"))
        self.write(committed)
        return committed

    def close(self) -> None:
        """End everything and remove the slots."""
        for operator in list(self._stops):
            self.stop(operator, drain=True)
        for closer in self._closers:
            closer()


@contextmanager
def relay_run(tmp: Path, log: Log | None = None) -> Iterator[RelayRun]:
    """A run whose slots lie in a folder of their own in shared memory."""

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relay-test-") as shm:
        run = RelayRun(tmp, Path(shm), log)
        try:
            yield run
        finally:
            run.close()


@contextmanager
def far(run: RelayRun) -> Iterator[tuple[Proxy, Callable[[int], VersionManifest], RelaySource]]:
    """A relay behind a proxy, and a source that cannot map its slots."""
    relay = run.relay(run=False)
    proxy = Proxy(int(relay.server.url.rsplit(":", 1)[1]))
    publisher = run.publisher()
    here = run.source()

    def say(url: str) -> None:
        name = relay.server.relay_id
        soon(lambda: here._directory.refresh().get(name), "heartbeat")
        run.write(replace(here._directory.refresh()[name], url=url, at_ms=int(time.time() * 1000)))

    def publish(version: int) -> VersionManifest:
        say(relay.server.url)
        manifest = run.publish(publisher, version)
        time.sleep(0.06)  # the least between two heartbeats
        relay.step(time.time())
        say(proxy.url)
        return manifest

    try:
        yield proxy, publish, run.source(map_local=False, pull_patience_s=1.0, stall_timeout_s=0.5)
    finally:
        proxy.close()
