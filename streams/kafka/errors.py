"""librdkafka's errors in our words. No KafkaException leaves the adapter."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from laminar.schemas.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    EncodeError,
    Evicted,
    Fatal,
    Fenced,
    LaminarError,
    OffsetOutOfRange,
    RecordTooLarge,
    Unavailable,
    UnknownTopic,
)

__all__ = ["error_of", "translate"]

_KINDS: tuple[tuple[type[LaminarError], tuple[int, ...]], ...] = (
    (
        Fenced,
        (
            KafkaError._FENCED,
            KafkaError.PRODUCER_FENCED,
            KafkaError.INVALID_PRODUCER_EPOCH,
            KafkaError.FENCED_INSTANCE_ID,
        ),
    ),
    (
        Evicted,
        (
            KafkaError.ILLEGAL_GENERATION,
            KafkaError.UNKNOWN_MEMBER_ID,
            KafkaError.FENCED_MEMBER_EPOCH,
            KafkaError.STALE_MEMBER_EPOCH,
            KafkaError.REBALANCE_IN_PROGRESS,
            KafkaError._ASSIGNMENT_LOST,
        ),
    ),
    (
        UnknownTopic,
        (
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError.UNKNOWN_TOPIC_ID,
            KafkaError._UNKNOWN_TOPIC,
            KafkaError._UNKNOWN_PARTITION,
        ),
    ),
    (EncodeError, (KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG, KafkaError.INVALID_TIMESTAMP)),
    (RecordTooLarge, (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)),
    (OffsetOutOfRange, (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)),
    (
        ConfigError,
        (
            KafkaError._INVALID_ARG,
            KafkaError._AUTHENTICATION,
            KafkaError._SSL,
            KafkaError.SASL_AUTHENTICATION_FAILED,
            KafkaError.UNSUPPORTED_SASL_MECHANISM,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            KafkaError.INVALID_CONFIG,
            KafkaError.INVALID_PARTITIONS,
            KafkaError.INVALID_REPLICATION_FACTOR,
            KafkaError.INVALID_SESSION_TIMEOUT,
            KafkaError.INVALID_TRANSACTION_TIMEOUT,
            KafkaError.TOPIC_EXCEPTION,
            KafkaError.POLICY_VIOLATION,
            KafkaError.UNSUPPORTED_VERSION,
            KafkaError._UNSUPPORTED_FEATURE,
        ),
    ),
    (DeadlineExceeded, (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError.REQUEST_TIMED_OUT)),
)
_BY_CODE = {code: kind for kind, codes in _KINDS for code in codes}


_NEEDS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "permissions on the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "READ on the group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "WRITE and DESCRIBE on the transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "IDEMPOTENT_WRITE on the cluster",
}
"""What an access control list must grant."""


def translate(error: KafkaError, where: str, *, needs: str = "") -> LaminarError:
    """Our error for librdkafka's; ``where`` says what was tried and on which broker.

    ``needs``: the permission for it, where more is known than the error's code says.
    """
    if error.code() in _NEEDS:
        return ConfigError(
            f"{where}: not permitted: the user of log.client needs {needs or _NEEDS[error.code()]} ({error.name()})"
        )
    kind = _BY_CODE.get(error.code())
    if error.code() == KafkaError._FATAL:  # the cause stands in the text only
        kind = Fenced if KafkaError(KafkaError.FENCED_INSTANCE_ID).str() in error.str() else Fatal
    if kind is None:
        kind = Fatal if error.fatal() else Aborted if error.txn_requires_abort() else Unavailable
    return kind(f"{where}: {error.str()} ({error.name()})")


def error_of(exception: KafkaException) -> KafkaError:
    """The KafkaError inside."""
    inner = exception.args[0] if exception.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))
