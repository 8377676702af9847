"""Whether a directory can hold a log: writable, and on a local disk.

SQLite's write-ahead log needs shared memory and locks that network file systems do not give to several machines.

>>> network_file_system("/data/runs/a", "srv:/x /data nfs4 rw 0 0\\n/dev/sda / ext4 rw 0 0\\n")
'nfs4 at /data'
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from laminar.schemas.errors import ConfigError

__all__ = ["network_file_system", "prepare"]

_NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "smb2", "smb3", "smbfs", "wekafs"),
        *("fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
    }
)


def network_file_system(path: str, mounts: str) -> str | None:
    """``type at mount point`` when the path lies on a network file system; ``mounts`` is /proc/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return f"{kind} at {best}" if kind in _NETWORK else None


def prepare(directory: Path, file: Path) -> None:
    """Make the directory. Raises ConfigError when it, or the database file in it, cannot be written or is remote."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, f"{file.name} is read-only")
    except OSError as error:
        raise ConfigError(f"log directory {directory} is not writable: {error.strerror or error}") from error
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    found = network_file_system(os.path.realpath(directory), mounts)
    if found is not None:
        raise ConfigError(
            f"log directory {directory} is on a network file system ({found}); "
            "the sqlite log needs a local disk, use log.kind: kafka across machines"
        )
