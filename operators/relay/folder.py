"""The folder of a relay's slots in shared memory: whose it is, who may map it, when it is removed.

``owner.lock`` is locked as long as the relay lives; ``owner.json`` names its boot, its run and its supervisor. A
crashed relay's folder stays, so that its successor adopts the slots and readers go on meanwhile. It is removed when
the relay drains, by the supervisor (``remove``), or, after kill -9 of everything, by the next relay that starts on
this machine (``remove_stale``).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from laminar.operators.operator import RunInfo
from laminar.operators.relay.config import RelayConfig
from laminar.operators.relay.slot import leased, replace_file, slots
from laminar.schemas.errors import ConfigError
from laminar.schemas.records import RelayStatus

__all__ = ["Claim", "claim", "host_id", "is_here", "remove", "remove_stale", "slot_folder"]

_log = logging.getLogger(__name__)

_OWNER = "owner.json"
_LOCK = "owner.lock"
_PREFIX = "laminar-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    boot_id: str
    run_dir: str
    pid: int
    supervisor: int
    """Process id of the relay's parent; 1 or 0 when it has none of its own."""
    supervisor_start: str
    """Its start time as the kernel counts it, so that a reused process id is noticed."""
    pid_namespace: str


class Claim:
    """Ownership of a folder; the kernel ends it with the process."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd

    def touch(self) -> None:
        """Sign of life, for remove_stale."""
        os.utime(self.folder / _OWNER)

    def release(self, *, and_remove: bool) -> None:
        """Give the folder up; ``and_remove`` deletes it (mappings that exist stay valid)."""
        if self._fd < 0:
            return
        if and_remove:
            remove(self.folder)
        os.close(self._fd)
        self._fd = -1


def slot_folder(config: RelayConfig, run: RunInfo, instance: str) -> Path:
    """Where the relay ``instance`` of this run keeps its slots."""
    if config.shm_dir is not None:
        return config.shm_dir if config.replicas == 1 else config.shm_dir / instance
    where = hashlib.sha256(str(run.run_dir.resolve()).encode()).hexdigest()[:8]
    run_id = re.sub(r"[^A-Za-z0-9_.]", "_", run.run_id)[:60]
    return config.shm_root / f"{_PREFIX}{run_id}-{instance}-{where}"


def claim(folder: Path, *, boot_id: str, run_dir: Path) -> Claim:
    """Make the folder and own it. Raises ConfigError when that is impossible or another relay owns it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"relay.shm_dir: {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for torn in folder.glob(".*"):
            torn.unlink(missing_ok=True)
        parent = os.getppid()
        owner = _Owner(
            boot_id=boot_id,
            run_dir=str(run_dir.resolve()),
            pid=os.getpid(),
            supervisor=parent,
            supervisor_start=_start_of(parent),
            pid_namespace=_pid_namespace(),
        )
        replace_file(folder / _OWNER, json.dumps(asdict(owner)).encode())
    except OSError as error:
        os.close(fd)
        taken = isinstance(error, BlockingIOError)
        reason = f"another relay uses it (process {_pid(folder)})" if taken else error.strerror
        raise ConfigError(f"relay.shm_dir: {folder}: {reason}") from error
    return Claim(folder, fd)


def remove(folder: Path) -> None:
    """Delete a relay's folder. Does nothing to one that is not a relay's. Readers that map a slot keep their bytes."""
    if (folder / _LOCK).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(root: Path, *, keep: Path, stale_after_s: float, now: float) -> list[Path]:
    """Remove what dead runs left below ``root``: no relay, no supervisor, no reader. Returns what was removed.

    Where the supervisor cannot be told (another container), a folder without a sign of life for ``stale_after_s``.
    """
    gone: list[Path] = []
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        if folder == keep or not (folder / _LOCK).is_file() or leased(folder / _LOCK):
            continue
        owner = _owner(folder)
        try:
            silent_s = now - (folder / (_OWNER if owner else _LOCK)).stat().st_mtime
        except OSError:
            continue
        known = owner is not None and owner.supervisor > 1 and owner.pid_namespace == _pid_namespace()
        if owner is not None and known:
            stale = _start_of(owner.supervisor) != owner.supervisor_start
        else:
            stale = silent_s > stale_after_s
        if stale and not any(leased(slot.data) for slot in slots(folder)):
            remove(folder)
            gone.append(folder)
            _log.info("removed slots of a dead run: %s", folder)
    return gone


def host_id() -> str:
    """This machine (its name and the kernel's boot): the same for all processes that may share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}/{boot}"


def is_here(status: RelayStatus) -> bool:
    """Whether this process can map the relay's slots: the folder is reachable and belongs to that boot."""
    owner = _owner(Path(status.shm_dir))
    return owner is not None and owner.boot_id == status.boot_id


def _owner(folder: Path) -> _Owner | None:
    try:
        return _Owner(**json.loads((folder / _OWNER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _pid(folder: Path) -> int:
    owner = _owner(folder)
    return owner.pid if owner else 0


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
