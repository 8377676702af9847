"""Kafka's jars: downloaded through Maven once, then served from a per-user cache.

The cache is ``$XDG_CACHE_HOME/laminar/kafka-VERSION/libs`` (default ``~/.cache``). It appears in one rename, so it is
complete or absent; several processes may ask for it at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar.schemas.errors import ConfigError, Unavailable
from laminar.streams.deadline import Deadline

__all__ = ["KAFKA_VERSION", "cache_dir", "ensure_jars"]

KAFKA_VERSION = "4.2.2"
"""Not 4.3 or 4.4: a broker that is killed there may forget how its transactions ended (ADR 0020)."""

_DEPENDENCIES = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.kafka", "kafka-tools", KAFKA_VERSION),
    ("org.slf4j", "slf4j-simple", "1.7.36"),
)
_DOWNLOAD_S = 600.0

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where this version of Kafka is kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "laminar" / f"kafka-{KAFKA_VERSION}"


def ensure_jars(cache: Path | None = None) -> Path:
    """The folder with Kafka's jars; asks Maven for them the first time.

    Raises ConfigError without Maven, Unavailable when the download fails, DeadlineExceeded when it takes too long.
    """
    folder = cache or cache_dir()
    libs = folder / "libs"
    if libs.is_dir():
        return libs
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError(f"broker: no Kafka in {libs} and no Maven (mvn) on PATH to download it with: install Maven")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(
            f"broker: cannot create {folder}: {e.strerror} (set XDG_CACHE_HOME to a writable folder)"
        ) from e
    deadline = Deadline.after(_DOWNLOAD_S, "Kafka is downloaded through Maven")
    with _locked(folder / "download.lock"):
        if not libs.is_dir():
            _log.info("downloading Apache Kafka %s through Maven into %s (once)", KAFKA_VERSION, folder)
            _download(maven, libs, deadline)
    return libs


def _download(maven: str, libs: Path, deadline: Deadline) -> None:
    with tempfile.TemporaryDirectory(dir=libs.parent, prefix="download-") as name:
        work = Path(name)
        (work / "pom.xml").write_text(_pom(), encoding="utf-8")
        command = [maven, "-q", "-B", "-f", str(work / "pom.xml"), "dependency:copy-dependencies"]
        try:
            done = subprocess.run(
                [*command, f"-DoutputDirectory={work / 'libs'}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=deadline.remaining(),
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise deadline.exceeded(maven) from e
        if done.returncode != 0:
            errors = [line for line in done.stdout.splitlines() if "ERROR" in line] or done.stdout.splitlines()
            raise Unavailable(f"broker: Maven could not download Kafka {KAFKA_VERSION}: {errors[0] if errors else '?'}")
        (work / "libs").rename(libs)


def _pom() -> str:
    listed = "\n".join(
        f"    <dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, name, version in _DEPENDENCIES
    )
    return f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>laminar</groupId><artifactId>broker</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
{listed}
  </dependencies>
</project>
"""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes. The holder's own download deadline bounds the wait."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
