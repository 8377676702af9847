"""Every error that Laminar raises on purpose.

The tree; the first level says whether trying the same thing again can help::

    LaminarError
    ├── Retryable              trying again, or after a rewind, may help
    │   ├── DeadlineExceeded   a named wait took longer than its deadline
    │   ├── Unavailable        a broker, relay or engine does not answer
    │   ├── Aborted            the transaction did not commit; rewind and redo
    │   ├── EngineLost         an engine died, hung or was given up, with everything in it
    │   └── Evicted            the group member lost its partitions; rewind and rejoin
    └── Fatal                  trying again cannot help
        ├── Fenced             a newer owner of the same identity exists; stop
        ├── ConfigError        a setting is wrong
        ├── InvalidRecord      a record breaks its own rules
        │   ├── EncodeError    refused at the producer
        │   └── DecodeError    refused at the consumer (a dead letter)
        ├── RecordTooLarge     above the topic's size limit; refused before it is sent
        ├── OffsetOutOfRange   retention has passed a position that is still needed
        ├── UnknownTopic       the topic does not exist
        ├── TopicMismatch      a topic exists with another shape than configured
        ├── InvalidRequest     an engine cannot ever serve this request
        ├── WeightsMismatch    weights, manifest and model do not agree
        └── CheckpointError    a checkpoint is missing, damaged or of another model

A message says what happened, where (``topic[partition]@offset``, a config path, a file and line) and what
would be valid. Each error takes one string, so all of them survive pickling.

>>> raise ConfigError("operators.reward.function: unknown 'exat' (valid: 'exact', 'module:function')")
Traceback (most recent call last):
    ...
laminar.schemas.errors.ConfigError: operators.reward.function: unknown 'exat' (valid: 'exact', 'module:function')
"""

__all__ = [
    "Aborted",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeError",
    "EncodeError",
    "EngineLost",
    "Evicted",
    "Fatal",
    "Fenced",
    "InvalidRecord",
    "InvalidRequest",
    "LaminarError",
    "OffsetOutOfRange",
    "RecordTooLarge",
    "Retryable",
    "TopicMismatch",
    "Unavailable",
    "UnknownTopic",
    "WeightsMismatch",
]


class LaminarError(Exception):
    """Base of all errors that Laminar raises on purpose."""


class Retryable(LaminarError):
    """Trying again, perhaps after a rewind, may help."""


class DeadlineExceeded(Retryable):
    """A named wait took longer than its deadline. The message carries the name and the seconds."""


class Unavailable(Retryable):
    """A broker, a relay or an engine does not answer."""


class Aborted(Retryable):
    """The transaction did not commit: none of it is visible. Rewind the inputs and redo the work."""


class EngineLost(Retryable):
    """An engine died, hung or was given up, with everything in it. It starts anew by itself and wants weights then."""


class Evicted(Retryable):
    """The group gave this member's partitions to another one: nothing was committed. Rewind and rejoin."""


class Fatal(LaminarError):
    """Trying again cannot help."""


class Fenced(Fatal):
    """A newer owner of the same transactional id or epoch exists. This process must stop."""


class ConfigError(Fatal):
    """A setting is wrong. The message names the config path and what would be valid."""


class InvalidRecord(Fatal):
    """A record breaks its own rules (lengths, versions, logprobs)."""


class EncodeError(InvalidRecord):
    """The producer refused the record; nothing was written."""


class DecodeError(InvalidRecord):
    """The bytes are not a record of any schema we know, or its lengths lie. The consumer dead-letters them."""


class RecordTooLarge(Fatal):
    """The encoded record is above its topic's size limit; it was refused before it was sent."""


class OffsetOutOfRange(Fatal):
    """A position that is still needed is no longer in the log. The message carries both offsets."""


class UnknownTopic(Fatal):
    """The topic does not exist (topics are never created by writing to them)."""


class TopicMismatch(Fatal):
    """A topic exists with another number of partitions, or a log belongs to another run."""


class InvalidRequest(Fatal):
    """The engine can never serve this request (for example: the prompt is longer than the model allows)."""


class WeightsMismatch(Fatal):
    """Weights, manifest and model do not agree in names, shapes, dtypes or digests."""


class CheckpointError(Fatal):
    """A checkpoint is missing, damaged or belongs to another model."""
