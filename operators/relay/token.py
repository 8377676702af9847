"""The shared secret of a run's relays, publishers and sources.

``LAMINAR_RELAY_TOKEN`` if set (runs over several machines), else ``relay.token`` in the run's folder, made with mode
0600 by whoever comes first.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["ENVIRONMENT", "FILE", "run_token"]

ENVIRONMENT = "LAMINAR_RELAY_TOKEN"
FILE = "relay.token"


def run_token(run_dir: Path) -> str:
    """The run's token; made if there is none. Several processes at once get the same one."""
    given = os.environ.get(ENVIRONMENT, "").strip()
    if given:
        return given
    path = run_dir / FILE
    run_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        beside = run_dir / f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, secrets.token_hex(32).encode())
        finally:
            os.close(fd)
        try:
            os.link(beside, path)  # unlike rename, it never replaces another process's token
        except FileExistsError:
            pass
        finally:
            beside.unlink()
    return path.read_text().strip()
