"""How clients of one cluster are configured, and what is known of its health.

Settings that the port's promises rest on are ours; the user's own (security, sockets) pass through unseen: neither
they nor librdkafka's log lines are ever printed. Its log goes to ``logging`` at DEBUG; what matters there comes back
as an error of ours.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from laminar.schemas.errors import DeadlineExceeded, LaminarError, Unavailable
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.errors import error_of, translate
from laminar.streams.kafka.refusal import REJECTED, cannot_connect, rejected, wrong_setting
from laminar.streams.kafka.settings import KafkaSettings
from laminar.streams.secret import is_secret_name

__all__ = ["Connection"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOVING = frozenset(
    {
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._WAIT_COORD,
    }
)
"""Something is being elected, loaded or created: true for a moment."""
_CONNECT: dict[str, Any] = {
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    "allow.auto.create.topics": False,
    # After a restart of the broker, librdkafka 2.16 would begin at the bootstrap addresses and drop the brokers that it
    # knew, but send a transaction's offsets to one of the dropped: they hang for good, and its thread spins. Without
    # that it connects to them again; a cluster that moved to other addresses is met by the restarted process.
    "metadata.recovery.strategy": "none",
}
# With "none" too, an admin client that asks for topics while its broker is away connects a thousand times a second, and
# takes most of a CPU; it has no offsets to send.
_ADMIN: dict[str, Any] = {"metadata.recovery.strategy": "rebootstrap"}
# A consumer holds about 16 MiB ahead of poll, and what one more answer of a broker decompresses to: brokers count
# compressed bytes, and text that repeats itself may be five hundred times smaller. Hence the small answers; a record
# that is larger comes alone.
_BOUNDED: dict[str, Any] = {
    "queued.min.messages": 1000,
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.max.bytes": 512 * 1024,
    "message.max.bytes": 512 * 1024,
    "max.partition.fetch.bytes": 256 * 1024,
    "fetch.wait.max.ms": 100,
    "fetch.queue.backoff.ms": 20,
    "fetch.error.backoff.ms": 100,
}


_PUBLIC = frozenset(
    {"plaintext", "ssl", "sasl_plaintext", "sasl_ssl", "plain", "scram-sha-256", "scram-sha-512", "https", "none"}
    | {"oauthbearer", "oidc", "gssapi"}
)
"""Values that may be shown."""
_NO_TOKEN = re.compile(r"Failed to acquire SASL OAUTHBEARER token: .*(onnect to|esolve host|imed out|imeout)")
"""Who gives tokens out is not there: an outage, though librdkafka calls it a failed authentication."""


class _Quiet(logging.Logger):
    """What librdkafka logs to: DEBUG whatever it says, as it repeats a refused connection many times a second."""

    def __init__(self, redacted: Callable[[str], str]) -> None:
        super().__init__(__name__)
        self._redacted = redacted

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ARG002
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", self._redacted(str(msg) % args if args else str(msg)))


class Connection:
    """Makes clients for one cluster."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.bootstrap = settings.bootstrap
        self.request_timeout_s = settings.request_timeout_s
        self.max_record_bytes = settings.max_record_bytes
        self._user = dict(settings.client)
        self._logger = _Quiet(self._redacted)
        self.initialising: dict[str, Producer] = {}
        """Producers by transactional id whose initialisation got no answer in time. It may arrive at the broker yet, so
        it is resumed: another one could overtake it, and would be fenced by it."""
        self._down_since: float | None = None
        self._ever_answered = False
        self._reason = ""
        self._rejected = False

    def admin(self) -> AdminClient:
        """A client for topics and offsets."""
        return self._made(lambda config: AdminClient(config, logger=self._logger), _ADMIN)

    def reader(self, *, fetch_wait_ms: int = 100) -> Consumer:
        """A consumer for self-assigned partitions; it never joins a group. ``fetch_wait_ms``: patience at the end."""
        config = self._reading("laminar-reader", None) | {"fetch.wait.max.ms": fetch_wait_ms}
        return self._made(lambda made: Consumer(made, logger=self._logger), config)

    def onlooker(self, group: str, isolation: str) -> Consumer:
        """A consumer that never subscribes: it sees a group's offsets. ``read_committed`` waits for open ones."""
        config = self._reading(group, None) | {"client.id": "laminar", "isolation.level": isolation}
        return self._made(lambda made: Consumer(made, logger=self._logger), config)

    def member(self, group: str, instance: str | None) -> Consumer:
        """A consumer for a group; ``instance`` makes it a static member under ``consumer``: see KafkaConsumer."""
        config = self._reading(group, instance) | {"max.poll.interval.ms": int(self.settings.poll_interval_s * 1000)}
        if self.settings.group_protocol == "consumer":
            config["group.protocol"] = "consumer"
            if instance is not None:
                config["group.instance.id"] = instance
        else:
            session_ms = int(self.settings.session_timeout_s * 1000)
            config |= {
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": max(200, session_ms // 6),
            }
        return self._made(lambda made: Consumer(made, logger=self._logger), config)

    def producer(self, transactional_id: str) -> Producer:
        """An idempotent, transactional producer; not yet initialised."""
        config = {
            "client.id": transactional_id,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(self.settings.transaction_timeout_s * 1000),
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "compression.type": self.settings.compression,
            "message.max.bytes": self.max_record_bytes + 1024 * 1024,
            "queue.buffering.max.kbytes": 2 * self.max_record_bytes // 1024,
            "queue.buffering.max.messages": 100_000,
        }
        if self.settings.compression == "zstd":
            config["compression.level"] = 1
        return self._made(lambda made: Producer(made, logger=self._logger), config)

    def failed(
        self, exception: KafkaException, what: str, *, client: AdminClient | Producer | None = None, needs: str = ""
    ) -> LaminarError:
        """Our error for a failed call; one that got no answer from any broker says for how long, and why.

        ``needs``: the permission that the call takes, such as ``WRITE on topic t``.
        """
        if client is not None:
            with suppress(KafkaException):  # raised again for a fatal error, which we have in hand
                client.poll(0)  # deliver the error events that explain it
        error = error_of(exception)
        found = translate(error, f"{what} on {self.bootstrap}", needs=needs)
        if not isinstance(found, (DeadlineExceeded, Unavailable)):
            return found
        if self._rejected:
            return rejected(self.bootstrap, self._user, self._reason)
        if _NO_TOKEN.search(self._reason):
            return Unavailable(f"Kafka broker {self.bootstrap}: {what}: {self._reason}")
        if not self._ever_answered:
            return self._cannot_connect(what) or found
        if self._down_since is None:
            return found
        return Unavailable(
            f"Kafka broker {self.bootstrap}: {what}: no answer within {self.request_timeout_s:g} s "
            f"({self._reason or error.str()})"
        )

    def _cannot_connect(self, what: str) -> LaminarError | None:
        return cannot_connect(self.bootstrap, self._user, what, self.request_timeout_s)

    def ask(self, call: Callable[[float], T], what: str, client: Consumer, *, timeout_s: float | None = None) -> T:
        """What ``call(seconds left)`` returns; asked again while leaders and coordinators move."""
        deadline = Deadline.after(self.request_timeout_s if timeout_s is None else timeout_s, what)
        while True:
            try:
                found = call(max(0.05, deadline.remaining()))
            except KafkaException as e:
                if error_of(e).code() not in _MOVING or deadline.passed:
                    raise self.failed(e, what) from e
                time.sleep(0.02)
                with suppress(KafkaException):
                    client.list_topics(timeout=max(0.05, deadline.remaining()))
                continue
            self.answered()
            return found

    def answered(self) -> None:
        """A broker answered: whatever outage there was is over."""
        self._down_since, self._rejected, self._reason, self._ever_answered = None, False, "", True

    def check_outage(self, client: Consumer) -> None:
        """Raise Unavailable once no broker has answered for the configured time. Cheap while all is well.

        Raises ConfigError, and sooner, where brokers answer but refuse us.
        """
        limit_s = self.request_timeout_s if self._rejected else self.settings.outage_s
        if self._down_since is None or time.monotonic() - self._down_since < limit_s:
            return
        try:
            client.list_topics(timeout=1.0)
        except KafkaException as e:
            if self._rejected:
                raise rejected(self.bootstrap, self._user, self._reason) from e
            raise Unavailable(
                f"Kafka broker {self.bootstrap}: no answer for {self.settings.outage_s:g} s "
                f"({self._reason or error_of(e).str()})"
            ) from e
        self.answered()

    def _reading(self, group: str, instance: str | None) -> dict[str, Any]:
        return {
            "group.id": group,
            "client.id": instance or group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "receive.message.max.bytes": 2 * self.max_record_bytes + 64 * 1024 * 1024,
            **_BOUNDED,
        }

    def _made(self, make: Callable[[dict[str, Any]], T], config: dict[str, Any]) -> T:
        try:
            return make(
                {"client.id": "laminar", **_CONNECT, **config, **self._user}
                | {"bootstrap.servers": self.bootstrap, "error_cb": self._on_error}
            )
        except KafkaException as e:
            raise wrong_setting(self._redacted(error_of(e).str()), self._user) from e

    def _redacted(self, text: str) -> str:
        for name, value in self._user.items():
            shown = str(value)
            if is_secret_name(name) or (isinstance(value, str) and len(value) > 3 and shown.lower() not in _PUBLIC):
                text = text.replace(shown, "...") if shown else text
        return text

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            if self._down_since is None:
                self._down_since = time.monotonic()
        elif error.code() in (KafkaError._TRANSPORT, KafkaError._RESOLVE, *REJECTED):
            self._reason = self._redacted(error.str().split("/bootstrap: ")[-1])
            self._rejected = error.code() in REJECTED and not _NO_TOKEN.search(self._reason)
        _log.debug("%s: %s", self.bootstrap, self._redacted(error.str()))
