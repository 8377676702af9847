"""A transactional producer with a stable id.

How a transaction ends, in numbered steps:

1. Offsets go to the coordinator with the metadata of the member (KIP-447); a stale member is refused: Evicted.
2. Commit. What timed out is asked again, never done again, until the deadline.
3. The markers of a committed transaction are written a moment after the answer; unless the caller does not mind, wait
   for them (briefly: another producer's open transaction on the same partition may hold them back), so that what
   returned is visible.
4. An outcome that is still unknown at the deadline is settled before the next transaction begins, by initialising the
   id anew: the coordinator then either completes the commit that it had accepted, or aborts. Until then the group's
   committed offsets do not answer, so nobody can rewind to the wrong place.

A broker fences the owner of a transaction that outlives the transaction timeout with the same answer as one that was
replaced. What tells them apart is the age of the transaction: fenced in a younger one, or outside of any, means
replaced, and Fenced stays Fenced. In an older one it is a DeadlineExceeded, with the outcome settled as in step 4; a
process that stalled for so long takes its id back, and the one that had replaced it, if any, is fenced in its turn, in
a young transaction: one of the two goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Producer as Client
from confluent_kafka import TopicPartition as Partition

from laminar.schemas.errors import (
    Aborted,
    DeadlineExceeded,
    Evicted,
    Fatal,
    Fenced,
    LaminarError,
    Retryable,
    Unavailable,
)
from laminar.streams.deadline import Deadline
from laminar.streams.kafka.admin import Admin
from laminar.streams.kafka.connection import Connection
from laminar.streams.kafka.consumer import Token
from laminar.streams.kafka.errors import error_of
from laminar.streams.kafka.transaction import KafkaTransaction, callbacks
from laminar.streams.log import Membership, TopicPartition, Transaction

__all__ = ["KafkaProducer"]

_log = logging.getLogger(__name__)

_VISIBLE_S = 2.0
_CLOSE_S = 2.0


class KafkaProducer:
    """Implements ``laminar.streams.log.Producer``. Its construction fences every older one of the id."""

    def __init__(self, connection: Connection, admin: Admin, transactional_id: str) -> None:
        self._connection = connection
        self._admin = admin
        self._id = transactional_id
        self._client: Client | None = None
        self._fenced: str | None = None
        self._closed = False
        self._open = False
        self._began = 0.0
        self._groups: dict[str, object] = {}
        self._needs = {
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: f"WRITE and DESCRIBE on transactional id {self._id}",
            KafkaError.TOPIC_AUTHORIZATION_FAILED: "WRITE on each topic that it writes to",
        }
        self._turn: Counter[str] = Counter()
        self._connect(connection.request_timeout_s)

    def transaction(
        self, timeout_s: float | None = None, *, visible: bool = True
    ) -> AbstractContextManager[Transaction]:
        """See the port. Raises Aborted, Evicted, Fenced, Unavailable, DeadlineExceeded, and what the block raises."""
        seconds = self._connection.request_timeout_s if timeout_s is None else timeout_s
        return self._transaction(seconds, visible=visible)

    def close(self) -> None:
        """Abort what is open and release the id."""
        self._closed = True
        client = self._client
        if client is not None:
            if self._open:
                self._abort(client, min(_CLOSE_S, self._connection.request_timeout_s))
            client.purge()
        self._client = None

    @contextmanager
    def _transaction(self, timeout_s: float, *, visible: bool) -> Iterator[Transaction]:
        if self._closed:
            raise Fatal(f"producer {self._id}: closed")
        if self._fenced is not None:
            raise Fenced(self._fenced)
        self._admin.watch.look()
        client = self._client or self._connect(timeout_s)
        try:
            client.begin_transaction()
        except KafkaException as e:
            raise self._ended(client, e, "begin") from e
        self._open, self._began = True, time.monotonic()
        transaction = KafkaTransaction(self._admin, client, self._id, timeout_s, self._turn, visible=visible)
        try:
            yield transaction
        except Fenced as e:
            raise self._given_up(e) from e
        except BaseException as e:
            reason = self._abort(client, timeout_s)
            if transaction.broken and reason is not None:
                raise reason from e
            raise
        self._commit(client, transaction, timeout_s)
        self._open = False

    def _connect(self, timeout_s: float) -> Client:
        client = self._connection.initialising.pop(self._id, None) or self._connection.producer(self._id)
        deadline = Deadline.after(timeout_s, f"transactional id {self._id} is taken over")
        try:
            self._retried(client, lambda left: client.init_transactions(left), deadline)
        except Retryable:
            self._connection.initialising[self._id] = client
            raise
        self._connection.answered()
        self._client = client
        return client

    def _commit(self, client: Client, transaction: KafkaTransaction, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s, f"transaction of {self._id} commits")
        try:
            for membership, offsets in transaction.offsets:
                self._send_offsets(client, membership, offsets, deadline)
            self._retried(client, lambda left: client.commit_transaction(left), deadline, transaction)
        except Fenced as e:
            if self._fenced is not None:
                raise
            raise self._given_up(e) from e
        except (DeadlineExceeded, Unavailable):
            self._open, self._client = False, None  # unknown: step 4
            raise
        except BaseException:
            self._abort(client, timeout_s)
            raise
        self._connection.answered()
        self._wait_until_visible(transaction.last)

    def _send_offsets(
        self, client: Client, membership: Membership, offsets: Mapping[TopicPartition, int], deadline: Deadline
    ) -> None:
        self._needs[KafkaError.GROUP_AUTHORIZATION_FAILED] = f"READ on group {membership.group}"
        token = membership.token
        metadata = token.metadata if isinstance(token, Token) else self._without_members(membership.group)
        positions = [Partition(p.topic, p.partition, offset) for p, offset in offsets.items()]
        bounded = _Bounded(lambda left: client.send_offsets_to_transaction(positions, metadata, left))
        self._retried(client, bounded, deadline)

    def _without_members(self, group: str) -> object:
        """Group metadata that says: no member, no epoch."""
        if group not in self._groups:
            passing: Consumer = self._connection.member(group, None)
            self._groups[group] = passing.consumer_group_metadata()
            passing.close()
        return self._groups[group]

    def _retried(
        self,
        client: Client,
        call: Callable[[float], None],
        deadline: Deadline,
        transaction: KafkaTransaction | None = None,
    ) -> None:
        """Call until it succeeds or fails for good; the deadline bounds it."""
        while True:
            try:
                with callbacks():
                    call(max(0.05, deadline.remaining()))
                return
            except KafkaException as e:
                error = error_of(e)
                if error.retriable() and not error.txn_requires_abort() and not deadline.passed:
                    time.sleep(0.01)
                    continue
                if transaction is not None and error.txn_requires_abort():
                    transaction.forget()
                raise self._ended(client, e, deadline.name) from e

    def _ended(self, client: Client, e: KafkaException, what: str) -> LaminarError:
        error = error_of(e)
        needs = self._needs.get(error.code(), "")
        found = self._connection.failed(
            e, what if self._id in what else f"producer {self._id}: {what}", client=client, needs=needs
        )
        if error.code() == KafkaError.FENCED_INSTANCE_ID:
            return Evicted(str(found))  # its group says to a member whether it was late for a poll, or replaced
        if isinstance(found, Fenced):
            return self._given_up(found)
        if error.txn_requires_abort() and not isinstance(found, (Evicted, Fatal)):
            return Aborted(str(found))
        return found

    def _given_up(self, found: Fenced) -> LaminarError:
        """Replaced, or too slow: see the module's docstring."""
        limit_s = self._connection.settings.transaction_timeout_s
        age_s = time.monotonic() - self._began if self._open else 0.0
        self._open, self._client = False, None
        if age_s > limit_s:
            return DeadlineExceeded(
                f"transaction of {self._id} ends: not within {limit_s:g} s, the transaction timeout "
                f"(after {age_s:.1f} s the broker has given it up): {found}"
            )
        self._fenced = f"producer {self._id}: fenced: a newer owner of this transactional id exists ({found})"
        return Fenced(self._fenced)

    def _abort(self, client: Client, timeout_s: float) -> LaminarError | None:
        """Never raises: what cannot be aborted now, for the returned reason, is before the next transaction begins."""
        if self._fenced is not None or (self._closed and self._client is None):
            return None
        try:
            deadline = Deadline.after(timeout_s, f"transaction of {self._id} aborts")
            self._retried(client, lambda left: client.abort_transaction(left), deadline)
        except LaminarError as e:
            self._client = None
            _log.warning("%s", e)
            return e
        finally:
            self._open = False
        return None

    def _wait_until_visible(self, last: Mapping[TopicPartition, int]) -> None:
        deadline = Deadline.after(_VISIBLE_S, f"transaction of {self._id} is visible")
        waiting = dict(last)
        while waiting and not deadline.passed:
            try:
                ends = self._admin.readable_ends(waiting, max(0.05, deadline.remaining()))
            except (LaminarError, KafkaException, RuntimeError) as e:  # it is committed whatever this says
                _log.info("%s: %s", deadline.name, e)
                return
            waiting = {p: offset for p, offset in waiting.items() if ends.get(p, 0) <= offset}
            if waiting:
                time.sleep(0.002)


class _Bounded:
    """A call that may exceed its timeout (librdkafka lets it wait for the transaction timeout), on its own thread.

    A call that is late is abandoned together with its client; nothing else uses that client any more.
    """

    def __init__(self, call: Callable[[float], None]) -> None:
        self._call = call

    def __call__(self, timeout_s: float) -> None:
        ended: list[BaseException | None] = []

        def run() -> None:
            try:
                self._call(timeout_s)
                ended.append(None)
            except BaseException as e:  # noqa: BLE001 - raised again by the caller's thread
                ended.append(e)

        thread = threading.Thread(target=run, daemon=True)  # for itself: it may have an abandoned client to destroy
        thread.start()
        thread.join(timeout_s)
        if not ended:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if ended[0] is not None:
            raise ended[0]
