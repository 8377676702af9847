"""The broker's process: formats its storage, starts it, waits until it answers, stops it.

It never outlives the process that started it: on Linux the kernel kills it when its parent dies, however it dies.
Starting again in the same folder, on any port, finds the same topics and records. While it runs it holds the folder's
``lock``: a second Kafka on the same files would destroy them.
"""

from __future__ import annotations

import base64
import fcntl
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from laminar.schemas.errors import ConfigError, LaminarError, Unavailable
from laminar.streams.broker.artifact import KAFKA_VERSION, ensure_jars
from laminar.streams.broker.java import find_java
from laminar.streams.broker.permission import Operation, Resource, allow, set_passwords
from laminar.streams.broker.properties import escaped, one_node
from laminar.streams.broker.security import Security
from laminar.streams.deadline import Deadline

__all__ = ["Broker", "start"]

_log = logging.getLogger(__name__)

# Runs between us and Java: asks the kernel for SIGKILL when the parent dies (prctl PR_SET_PDEATHSIG), makes sure that
# the parent did not die before that, and becomes Java. A preexec_fn would do the same, unsafely where threads run.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

_SERVER_PORTS = range(10_000, 32_000)


class Broker:
    """One Kafka node in a folder. ``start`` it, or use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 9092,
        host: str = "127.0.0.1",
        session_timeout_s: float = 6.0,
        heap_mb: int = 512,
        settings: Mapping[str, str] | None = None,
        security: Security | None = None,
    ) -> None:
        """
        :param directory: holds ``data/``, ``server.properties`` and ``broker.log``; made if missing
        :param port: 0 = a free one, chosen once
        :param session_timeout_s: silence after which a group member counts as dead (both group protocols)
        :param settings: further broker properties; they win over ours
        :param security: what it demands of its clients; nothing by default
        """
        self.directory = directory.absolute()
        self.host = host
        self.port = port or free_port(host)
        self._session_timeout_ms = int(session_timeout_s * 1000)
        self._heap_mb = heap_mb
        self._settings = dict(settings or {})
        self.security = security or Security()
        self._inside = self.bootstrap
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """What a client connects to: ``host:port``."""
        return f"{self.host}:{self.port}"

    @property
    def log_file(self) -> Path:
        """Where the broker's own log goes."""
        return self.directory / "broker.log"

    @property
    def pid(self) -> int | None:
        """Of the running process; None when there is none."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 120.0) -> Broker:
        """Start and wait until it answers.

        Raises ConfigError (port or folder in use, no Java, folder not writable), Unavailable (it exited),
        DeadlineExceeded.
        """
        if self.running:
            return self
        self._check_port()
        java, libs = find_java(), ensure_jars()
        deadline = Deadline.after(timeout_s, f"Kafka broker on {self.bootstrap} answers")
        with self._claimed() as lock:  # Kafka inherits it, and with it the lock
            self._launch(java, libs, lock.fileno(), deadline)
        try:
            self._wait_until_it_answers(deadline)
            if self.security.users and self.security.mechanism != "PLAIN":
                set_passwords(self._inside, self.security.users, self.security.mechanism)
        except BaseException:
            self.kill()
            raise
        _log.info("Kafka broker answers on %s (data in %s)", self.bootstrap, self.directory)
        return self

    def allow(
        self, user: str, resource: Resource, name: str, operations: Sequence[Operation], *, prefixed: bool = False
    ) -> None:
        """Let a user do this with a resource (with ``permissions``); see laminar.streams.broker.permission."""
        allow(self._inside, user, resource, name, operations, prefixed=prefixed)

    @property
    def inside(self) -> str:
        """Address without any protection, for tools on this machine; the same as ``bootstrap`` by default."""
        return self._inside

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within ``timeout_s``."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout_s: float = 20.0) -> None:
        """Stop in order; kill what has not stopped by then."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGTERM)
            if not self.wait(timeout_s):
                _log.warning("Kafka broker on %s did not stop within %g s: killed", self.bootstrap, timeout_s)
        self.kill()

    def kill(self) -> None:
        """Stop at once (kill -9)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as e:
                raise ConfigError(
                    f"broker: cannot listen on {self.bootstrap}: {e.strerror} (choose another port)"
                ) from e

    def _claimed(self) -> BinaryIO:
        """The folder's lock. Raises ConfigError while another broker holds it, or if it cannot be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / "lock").open("ab")
        except OSError as e:
            raise ConfigError(f"broker: cannot write to {self.directory}: {e.strerror}") from e
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"broker: another broker runs in {self.directory} (use that one, or choose another folder)"
            ) from None
        return lock

    def _launch(self, java: Path, libs: Path, lock: int, deadline: Deadline) -> None:
        properties = self._write_properties()
        classpath = ["-cp", f"{libs}/*"]
        if not (self.directory / "data" / "meta.properties").exists():
            identity = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            self._format([str(java), *_QUICK, *classpath], ["-t", f"A{identity[1:]}", "-c", str(properties)], deadline)
        with self.log_file.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
                    *(str(java), *_QUICK, f"-Xmx{self._heap_mb}m", *_logging(), *classpath),
                    *("kafka.Kafka", str(properties)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )

    def _write_properties(self) -> Path:
        secured = self.security != Security()
        self._inside = f"{self.host}:{free_port(self.host)}" if secured else self.bootstrap
        ours = one_node(
            client=self.bootstrap,
            inside=self._inside,
            controller=f"{self.host}:{free_port(self.host)}",
            data=self.directory / "data",
            session_timeout_ms=self._session_timeout_ms,
            protocol=self.security.protocol,
        )
        ours |= {**self.security.properties(self.host), **self._settings}
        path = self.directory / "server.properties"
        try:
            path.touch(mode=0o600)
            path.chmod(0o600)  # it may hold passwords
            path.write_text("".join(f"{key}={escaped(value)}\n" for key, value in ours.items()), encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"broker: cannot write to {self.directory}: {e.strerror}") from e
        return path

    def _format(self, java: list[str], options: list[str], deadline: Deadline) -> None:
        try:
            done = subprocess.run(
                [*java, "kafka.tools.StorageTool", "format", *options],
                capture_output=True,
                text=True,
                timeout=deadline.remaining(),
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise deadline.exceeded("formatting its storage") from e
        if done.returncode != 0:
            reason = _reason([*done.stdout.splitlines(), *done.stderr.splitlines()])
            raise Unavailable(f"broker: cannot format {self.directory}: {reason}")

    def _wait_until_it_answers(self, deadline: Deadline) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        while True:
            if not self.running:
                raise self._exited()
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((self.host, self.port)) == 0:
                    break
            deadline.check(f"log: {self.log_file}")
            time.sleep(0.05)
        admin = AdminClient({"bootstrap.servers": self._inside, "log_level": 0, "reconnect.backoff.max.ms": 200})
        while True:
            try:
                if admin.list_topics(timeout=1.0).brokers:
                    return
            except KafkaException:
                pass
            if not self.running:
                raise self._exited()
            deadline.check(f"log: {self.log_file}")

    def _exited(self) -> LaminarError:
        """Why it did not come up."""
        words = self._last_words()
        if "UnsupportedVersionException: Can't read" in words:
            return ConfigError(
                f"broker: {self.directory} was written by a Kafka newer than {KAFKA_VERSION}, which cannot read it:"
                f" name another folder ({words})"
            )
        return Unavailable(f"broker: Kafka {KAFKA_VERSION} exited: {words} (log: {self.log_file})")

    def _last_words(self) -> str:
        with self.log_file.open(encoding="utf-8", errors="replace") as lines:
            return _reason(list(lines)[-200:])


def start(directory: Path, port: int = 9092, *, timeout_s: float = 120.0, session_timeout_s: float = 6.0) -> Broker:
    """A running broker in ``directory``; see Broker."""
    return Broker(directory, port=port, session_timeout_s=session_timeout_s).start(timeout_s)


def _reason(lines: list[str]) -> str:
    """The line of Java's last words that says what is wrong."""
    said = [line.strip() for line in lines if line.strip() and not line.strip().startswith("at ")]
    told = [line for line in said if "Exception" in line]
    return (told or said or ["no reason given"])[-1]


def _logging() -> tuple[str, ...]:
    prefix = "-Dorg.slf4j.simpleLogger"
    return (f"{prefix}.defaultLogLevel=warn", f"{prefix}.showDateTime=true", f"{prefix}.dateTimeFormat=HH:mm:ss.SSS")


def free_port(host: str) -> int:
    """A port that is free now, below those that systems give to clients: none of theirs can take it meanwhile."""
    for _ in range(100):
        port = secrets.choice(_SERVER_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise Unavailable(f"no free port on {host} among {_SERVER_PORTS.start} to {_SERVER_PORTS.stop - 1}")
