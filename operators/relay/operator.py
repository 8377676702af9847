"""The relay: holds the newest weights in shared memory, serves them, and pulls what it lacks from its predecessor.

One step writes a heartbeat when one is due or something changed, folds ``weights.versions``, and starts or ends the
one pull, which runs in a thread. HTTP is served by threads. A pull is of the newest committed version only: a relay
that fell behind never works through a backlog. A crashed relay's slots survive it (see folder).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid

from laminar.operators.operator import Context, Operator
from laminar.operators.relay.chain import alive, candidates
from laminar.operators.relay.config import RelayConfig
from laminar.operators.relay.directory import RelayDirectory
from laminar.operators.relay.folder import claim, host_id, remove_stale, slot_folder
from laminar.operators.relay.pull import Pull, Quarantine, Superseded
from laminar.operators.relay.serve import RelayServer
from laminar.operators.relay.space import check_space
from laminar.operators.relay.store import SlotStore
from laminar.operators.relay.token import run_token
from laminar.operators.relay.versions import VersionFollower
from laminar.schemas.errors import ConfigError, LaminarError
from laminar.schemas.records import RelayStatus, VersionManifest
from laminar.streams.deadline import Deadline
from laminar.streams.topics import outgoing

__all__ = ["RelayOperator", "build"]

_log = logging.getLogger(__name__)

_MIN_HEARTBEAT_S = 0.05
_PULL_AGAIN_S = 0.5
_CATCH_UP_S = 60.0
_DRAIN_S = 10.0


def build(config: RelayConfig, context: Context) -> Operator:
    """The relay of this process. Raises ConfigError: shared memory too small, folder or port taken."""
    return RelayOperator(config, context)


class RelayOperator:
    """See the module's docstring."""

    def __init__(self, config: RelayConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self.boot_id = uuid.uuid4().hex
        self._token = run_token(context.run.run_dir)
        self._stop = threading.Event()
        self._quarantine = Quarantine()
        self._lock = threading.Lock()
        self._relays: dict[str, RelayStatus] = {}
        self._newest: VersionManifest | None = None
        self._puller: threading.Thread | None = None
        self._pull_after = 0.0
        self._next_heartbeat = 0.0
        self._last_heartbeat = 0.0
        self._announced = -1
        self._drain_until: float | None = None

        folder = slot_folder(config, context.run, context.instance)
        check_space(config, context.run, folder)
        self._directory = RelayDirectory(context)
        self._versions = VersionFollower(context)
        self._versions.catch_up(Deadline.after(_CATCH_UP_S, "read weights.versions"))
        self._claim = claim(folder, boot_id=self.boot_id, run_dir=context.run.run_dir)
        self.store = SlotStore(folder, keep=config.keep_versions, hash_threads=config.hash_threads)
        try:
            self.server = self._listen()
            self._producer = context.log.producer(context.transactional_id)  # only now: it fences whoever has the id
        except BaseException:
            self.store.close()
            self._claim.release(and_remove=False)
            raise
        remove_stale(config.shm_root, keep=folder, stale_after_s=config.stale_after_s, now=time.time())
        self.store.enlist(self._versions.published)
        self._adopter = threading.Thread(target=self._adopt, name="relay-adopt", daemon=True)
        self._adopter.start()
        self.server.start()
        _log.info("relay %s serves %s from %s", context.instance, self.server.url, folder)

    def step(self, now: float) -> bool:
        """Heartbeat, fold, pull."""
        worked = self._heartbeat(now)
        worked = self._versions.poll() or worked
        relays = self._directory.refresh()
        with self._lock:
            self._relays = relays
            self._newest = self._versions.newest
        self._start_pull(now)
        return worked

    def drain(self, now: float) -> bool:
        """Finish only a publication that is under way. Nobody waits for a relay that stops: its peers skip it."""
        if self._drain_until is None:
            self._drain_until = now + _DRAIN_S
        self._heartbeat(now)
        return now >= self._drain_until or not self.store.writing()

    def close(self) -> None:
        """Stop serving. After a drain the slots are removed; otherwise they stay for a successor."""
        self._stop.set()
        self.server.close()
        self.store.close()
        for thread in (self._puller, self._adopter):
            if thread is not None:
                thread.join(timeout=self._config.read_timeout_s)
        for part in (self._producer, self._directory, self._versions):
            part.close()
        self._claim.release(and_remove=self._drain_until is not None)

    def _listen(self) -> RelayServer:
        config = self._config
        return RelayServer(
            self.store,
            relay_id=self._context.instance,
            boot_id=self.boot_id,
            token=self._token,
            host=config.host,
            port=config.port,
            advertise=config.advertise,
            chunk_bytes=config.chunk_bytes,
            max_connections=config.max_connections,
            read_timeout_s=config.read_timeout_s,
        )

    def _adopt(self) -> None:
        self.store.adopt(self._stop.is_set)

    def _heartbeat(self, now: float) -> bool:
        generation = self.store.generation
        changed = generation != self._announced and now >= self._last_heartbeat + _MIN_HEARTBEAT_S
        if now < self._next_heartbeat and not changed:
            return False
        status = RelayStatus(
            relay_id=self._context.instance,
            boot_id=self.boot_id,
            url=self.server.url,
            host=host_id(),
            shm_dir=str(self.store.folder.resolve()),
            zone=self._config.zone,
            versions=self.store.held(),
            at_ms=int(now * 1000),
        )
        with self._producer.transaction() as tx:
            tx.send(outgoing(self._context.codec, status))
        self._claim.touch()
        self._announced = generation
        self._last_heartbeat = now
        self._next_heartbeat = now + self._config.heartbeat_s
        return True

    def _start_pull(self, now: float) -> None:
        if self._puller is not None and self._puller.is_alive():
            return
        newest = self._newest
        if newest is None or now < self._pull_after or self._adopter.is_alive() or self.store.has(newest):
            return
        if not self._peers(newest):
            return
        self._pull_after = now + _PULL_AGAIN_S
        self._puller = threading.Thread(target=self._pull, args=(newest,), name="relay-pull", daemon=True)
        self._puller.start()

    def _pull(self, manifest: VersionManifest) -> None:
        """In a thread: one attempt to have the version here, until it is, cannot be, or is superseded."""
        deadline = Deadline.after(self._config.pull_timeout_s, f"pull of version {manifest.version}")
        try:
            fill = self.store.begin(manifest)
        except (ConfigError, LaminarError) as error:
            _log.error("version %d is not pulled: %s", manifest.version, error)
            return
        try:
            Pull(
                manifest=manifest,
                data=fill.data,
                peers=lambda: self._peers(manifest),
                token=self._token,
                quarantine=self._quarantine,
                on_chunk=fill.verified,
                wanted=lambda: self._wanted(manifest),
                nearly_done=self._config.nearly_done,
                read_timeout_s=self._config.read_timeout_s,
                stall_timeout_s=self._config.stall_timeout_s,
            ).run(deadline)
        except Superseded as error:
            _log.info("%s", error)
        except LaminarError as error:
            _log.warning("version %d is not pulled: %s", manifest.version, error)
        finally:
            fill.close()

    def _wanted(self, manifest: VersionManifest) -> bool:
        with self._lock:
            newest = self._newest
        return not self._stop.is_set() and newest is manifest

    def _peers(self, manifest: VersionManifest) -> list[RelayStatus]:
        with self._lock:
            relays = self._relays
        dead_after_ms = int(self._config.dead_after_s * 1000)
        living = alive(relays, now_ms=int(self._context.clock() * 1000), dead_after_ms=dead_after_ms)
        return candidates(manifest, living, me=self._context.instance)
