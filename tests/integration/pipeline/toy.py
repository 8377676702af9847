"""A process for the supervisor to look after: ``python toy.py BEHAVIOUR FOLDER``. It leaves its pid in the folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOREVER_S = 120.0


def main(behaviour: str, folder: Path) -> int:
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
        (folder / f"{child.pid}.pid").touch()
    (folder / f"{os.getpid()}.pid").touch()
    if behaviour in ("retryable", "wrong_config"):
        sys.stderr.write(json.dumps({"level": "error", "message": f"Toy: {behaviour}"}) + "\n")
        return 75 if behaviour == "retryable" else 78
    if behaviour == "bug":
        raise RuntimeError("a bug")
    if behaviour == "late" and len(list(folder.glob("*.pid"))) < 3:
        return 75
    time.sleep(FOREVER_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
