"""The relay against a plain memory copy, and a chain of relays against one pull.

``python -m benchmarks.relay [--quick]``

* Publication: a trainer process stages and seals a version into its relay (another process), a rollout's source maps
  it; the reference copies the same tensors once from memory to memory. Ratio: bytes/s over the copy's bytes/s.
* Pull: the same version over HTTP into fresh memory, verified; the reference moves the same bytes over a bare socket
  of this machine (sendall, recv_into).
* Chain: three relays behind links of a fixed speed, each pulling from the one before it while that one still pulls;
  the reference is one relay behind one such link. Ratio: time over time. Three pulls one after the other make 3.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from benchmarks.claim import Claim, best_ms, quick_from_arguments, report
from laminar.operators.operator import Context, ModelConfig, RunInfo
from laminar.operators.relay.config import RelayConfig
from laminar.operators.relay.manifest import chunk_digest, n_chunks, root_digest
from laminar.operators.relay.operator import RelayOperator
from laminar.operators.relay.publisher import RelayPublisher
from laminar.operators.relay.pull import Pull, Quarantine
from laminar.operators.relay.serve import RelayServer
from laminar.operators.relay.source import RelaySource
from laminar.operators.relay.store import SlotStore
from laminar.operators.weights import NamedTensor
from laminar.schemas.codec import Codec
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline
from laminar.streams.sqlite import SqliteLog
from laminar.streams.topics import topic_specs

_MIB = 1 << 20
_LINK_BYTES_PER_S = 8 * _MIB
_CHUNK = _MIB // 2
_CHAIN = 3

GOAL_PUBLISH = 0.3
"""A publication is a copy and two digest passes, and takes no longer than about three copies."""
GOAL_PULL = 0.5
GOAL_CHAIN = 1.25


def _context(folder: Path, instance: str) -> Context:
    run = RunInfo(
        run_id="bench",
        run_dir=folder,
        steps=1,
        groups_per_step=1,
        group_size=1,
        max_staleness=None,
        seed=0,
        model=ModelConfig(path=folder / "model"),
    )
    log = SqliteLog(folder / "log")
    log.create_topics(topic_specs())
    return Context(run=run, name=instance.split("-")[0], instance=instance, log=log, codec=Codec())


def _serve(folder: str, shm: str, total: int, port: Connection, stop: Event) -> None:
    """A relay process; beside it, on another port, a bare socket that sends ``total`` bytes to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname()[1])
    payload = memoryview(bytearray(total))

    def send() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(payload)

    threading.Thread(target=send, daemon=True).start()
    config = RelayConfig(shm_root=Path(shm), keep_versions=2, heartbeat_s=0.5)
    relay = RelayOperator(config, _context(Path(folder), "relay-0"))
    while not stop.is_set():
        if not relay.step(time.time()):
            stop.wait(0.01)
    while not relay.drain(time.time()):
        stop.wait(0.01)
    relay.close()


def _tensors(total: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    each = 8 * _MIB
    return [rng.integers(0, 256, each, dtype=np.uint8) for _ in range(total // each)]


def _publication(total: int, rounds: int, folder: Path, port: int) -> dict[str, float]:
    """Milliseconds of one copy, of publish and map, of an HTTP pull and of a bare socket."""
    arrays = _tensors(total)
    target = [np.zeros_like(a) for a in arrays]
    named = [NamedTensor(name=f"t{i}", dtype="U8", shape=a.shape, data=memoryview(a)) for i, a in enumerate(arrays)]
    context = _context(folder, "trainer-0")
    publisher, source = RelayPublisher.from_context(context), RelaySource.from_context(context)
    remote = RelaySource(context, token=source.token, map_local=False)
    limit = Deadline.after(300, "benchmark")
    versions: list[VersionManifest] = []

    def copy() -> None:
        for a, b in zip(arrays, target, strict=True):
            np.copyto(b, a)

    def publish_and_map() -> None:
        number = len(versions)
        arrays[0][0] = number
        prepared = publisher.stage(
            named, tied={}, epoch=0, version=number, parent=number - 1, step=number, deadline=limit
        )
        versions.append(publisher.seal(prepared, limit))
        with source.open(versions[-1], limit) as views:
            if len(views) != len(named):
                raise RuntimeError("tensors are missing")

    def pull() -> None:
        with remote.open(versions[-1], limit):
            pass

    copy()
    for _ in range(4):  # every slot is allocated and mapped: the steady state of a run
        publish_and_map()
    work: dict[str, Callable[[], object]] = {
        "copy": copy,
        "publish": publish_and_map,
        "socket": lambda: _bare_socket(total, port),
        "pull": pull,
    }
    took = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):  # side by side, so that a busy machine hits all of them
        for name, call in work.items():
            took[name] = min(took[name], best_ms(call, rounds=1, calls=1))
    publisher.close()
    source.close()
    remote.close()
    return took


def _bare_socket(total: int, port: int) -> None:
    """Receive ``total`` bytes from the other process into fresh memory."""
    into = memoryview(bytearray(total))
    filled = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while filled < total:
            filled += connection.recv_into(into[filled:])


class _Link:
    """Forwards to a port; what comes back has a fixed speed."""

    def __init__(self, port: int, bytes_per_s: int) -> None:
        self._port = port
        self._speed = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._copy, args=(client, server, 0), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, self._speed), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, bytes_per_s: int) -> None:
        free_at = 0.0
        with contextlib.suppress(OSError):
            while piece := source.recv(256 * 1024):
                if bytes_per_s:
                    free_at = max(free_at, time.perf_counter()) + len(piece) / bytes_per_s
                    time.sleep(max(0.0, free_at - time.perf_counter()))
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _node(shm: Path, name: str) -> Iterator[tuple[SlotStore, _Link, RelayStatus]]:
    """A store, its server behind a link, and the heartbeat that leads there."""
    folder = shm / name
    folder.mkdir()
    store = SlotStore(folder, keep=1)
    server = RelayServer(store, relay_id=name, boot_id=name, token="t", host="127.0.0.1", port=0, chunk_bytes=_MIB)
    server.start()
    link = _Link(int(server.url.rsplit(":", 1)[1]), _LINK_BYTES_PER_S)
    status = RelayStatus(relay_id=name, boot_id=name, url=link.url, host="", shm_dir=str(folder), versions=(), at_ms=0)
    try:
        yield store, link, status
    finally:
        server.close()
        link.close()
        store.close()


def _chain_s(total: int, relays: int, shm: Path, label: str) -> float:
    """Seconds until the last of ``relays`` relays in a row has a version that only the origin had."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(_node(shm, f"{label}-{i}")) for i in range(relays + 1)]
        origin = nodes[0][0]
        slot = origin.reserve(epoch=0, version=0, total_bytes=total)
        data = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8).tobytes()
        slot.path.write_bytes(data)
        digests = b"".join(chunk_digest(data[i : i + _CHUNK]) for i in range(0, total, _CHUNK))
        manifest = VersionManifest(
            run_id="bench",
            epoch=0,
            version=0,
            parent=-1,
            step=0,
            state="committed",
            tensors=(),
            total_bytes=total,
            chunk_bytes=_CHUNK,
            chunk_digests=digests,
            root_digest=root_digest(digests),
            relay_id=f"{label}-0",
            relay_url="",
            relay_boot="",
            at_ms=0,
        )
        origin.seal(slot.index, slot.nonce, manifest)
        fills = [store.begin(manifest) for store, _, _ in nodes[1:]]

        def pull(index: int) -> None:
            fill = fills[index]
            Pull(
                manifest=manifest,
                data=fill.data,
                peers=lambda: [nodes[index][2]],
                token="t",
                quarantine=Quarantine(),
                on_chunk=fill.verified,
            ).run(Deadline.after(300, "chain"))
            fill.close()

        threads = [threading.Thread(target=pull, args=(i,)) for i in range(relays)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        for store, _, _ in nodes[1:]:
            if not store.has(manifest) or n_chunks(manifest) != total // _CHUNK:
                raise RuntimeError("the chain lost the version")
    return seconds


def main() -> None:
    """Measure, print the table and the claims."""
    quick = quick_from_arguments(__doc__)
    total = (64 if quick else 512) * _MIB
    chained = (24 if quick else 64) * _MIB
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="laminar-bench-") as shm,
    ):
        spawn = multiprocessing.get_context("spawn")
        stop = spawn.Event()
        here, there = spawn.Pipe()
        relay = spawn.Process(target=_serve, args=(folder, shm, total, there, stop))
        relay.start()
        try:
            took = _publication(total, 7 if quick else 11, Path(folder), here.recv())
        finally:
            stop.set()
            relay.join(30)
        one = _chain_s(chained, 1, Path(shm), "one") * 1e3
        three = _chain_s(chained, _CHAIN, Path(shm), "three") * 1e3

    rows = [
        (what, took[name], total / 1e6 / took[name])
        for name, what in (
            ("copy", "plain copy, memory to memory"),
            ("publish", "publish (copy, digest, verify, seal) and map"),
            ("socket", "bare local socket"),
            ("pull", "pull over HTTP, verified"),
        )
    ]
    link = f"{chained // _MIB} MiB, links of {_LINK_BYTES_PER_S // _MIB} MiB/s"
    rows += [
        (f"one relay pulls {link}", one, chained / 1e6 / one),
        (f"the last of {_CHAIN} in a chain, same links", three, chained / 1e6 / three),
    ]
    report(
        f"relay: {total // _MIB} MiB of weights, best of the rounds",
        ("", "ms", "GB/s"),
        rows,
        [
            Claim(
                name="relay.publish_and_map",
                ratio=took["copy"] / took["publish"],
                goal=GOAL_PUBLISH,
                unit="x",
                lower_is_better=False,
            ),
            Claim(
                name="relay.pull", ratio=took["socket"] / took["pull"], goal=GOAL_PULL, unit="x", lower_is_better=False
            ),
            Claim(name="relay.chain_of_3", ratio=three / one, goal=GOAL_CHAIN, unit="x", lower_is_better=True),
        ],
    )


if __name__ == "__main__":
    main()
