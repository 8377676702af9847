"""What an audit needs of a record, and no more: the other fields are skipped in the bytes, not decoded.

A peek checks that the bytes are one whole record of a known schema, and not the rules inside it. What only a full
decode can find wrong has its consumer's dead letter, which names the record by its place.

>>> Peek(Codec()).read(value)                                                           # doctest: +SKIP
Delta(trajectory_id='d/0/7/3', attempt=0, start=64, n_tokens=16)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from laminar.schemas import records as r
from laminar.schemas.codec import Codec
from laminar.schemas.errors import DecodeError
from laminar.schemas.schema_set import PACKAGED
from laminar.streams.topics import TOPICS

if TYPE_CHECKING:
    from laminar.schemas.framing import Written

__all__ = ["Admitted", "Adopted", "Delta", "Done", "Manifest", "Peek", "Scored", "Started"]


class Admitted(NamedTuple):
    """Of a Prompt."""

    prompt_id: str
    group_size: int
    train: bool
    round: int
    round_size: int
    min_version: int


class Started(NamedTuple):
    """Of a TrajectoryStarted."""

    trajectory_id: str
    attempt: int
    rollout_id: str
    incarnation: int
    version: int
    pinned: bool


class Delta(NamedTuple):
    """Of a TrajectoryTokens."""

    trajectory_id: str
    attempt: int
    start: int
    n_tokens: int


class Done(NamedTuple):
    """Of a CompletedTrajectory."""

    trajectory_id: str
    attempt: int
    n_tokens: int
    rollout_id: str
    version_min: int
    version_max: int
    pinned: bool
    """The rollout that finished it takes new weights with nothing in the engine."""


class Scored(NamedTuple):
    """Of a ScoredTrajectory: its completed trajectory."""

    done: Done


class Adopted(NamedTuple):
    """Of an AdoptCommand."""

    trajectory_id: str
    attempt: int
    rollout_id: str
    incarnation: int


class Manifest(NamedTuple):
    """Of a VersionManifest."""

    run_id: str
    version: int
    step: int
    committed: bool


_PINNED: r.UpdateMode = "pinned"

_Fields = Mapping[str, "_Fields | None"]

_DONE: _Fields = {
    "trajectory_id": None,
    "attempt": None,
    "response": {"n_tokens": None},
    "rollout_id": None,
    "version_min": None,
    "version_max": None,
    "updates": None,
}
_KEPT: Mapping[str, _Fields] = {
    "Prompt": dict.fromkeys(("prompt_id", "epoch", "purpose", "group_size", "min_version", "round_size")),
    "TrajectoryStarted": dict.fromkeys(("trajectory_id", "attempt", "rollout_id", "incarnation", "version", "updates")),
    "TrajectoryTokens": {"trajectory_id": None, "attempt": None, "start": None, "tokens": {"n_tokens": None}},
    "CompletedTrajectory": _DONE,
    "ScoredTrajectory": {"trajectory": _DONE},
    "AdoptCommand": {"rollout_id": None, "incarnation": None, "snapshot": dict.fromkeys(("trajectory_id", "attempt"))},
    "VersionManifest": dict.fromkeys(("run_id", "version", "step", "state")),
}
"""Record -> the fields that are read."""


def _done(p: Any) -> Done:
    return Done(
        p["trajectory_id"],
        p["attempt"],
        p["response"]["n_tokens"],
        p["rollout_id"],
        p["version_min"],
        p["version_max"],
        p["updates"] == _PINNED,
    )


_MAKE: Mapping[str, Callable[[Any], object]] = {
    "Prompt": lambda p: Admitted(
        p["prompt_id"], p["group_size"], p["purpose"] == "train", p["epoch"], p["round_size"], p["min_version"]
    ),
    "TrajectoryStarted": lambda p: Started(
        p["trajectory_id"], p["attempt"], p["rollout_id"], p["incarnation"], p["version"], p["updates"] == _PINNED
    ),
    "TrajectoryTokens": lambda p: Delta(p["trajectory_id"], p["attempt"], p["start"], p["tokens"]["n_tokens"]),
    "CompletedTrajectory": _done,
    "ScoredTrajectory": lambda p: Scored(_done(p["trajectory"])),
    "AdoptCommand": lambda p: Adopted(
        p["snapshot"]["trajectory_id"], p["snapshot"]["attempt"], p["rollout_id"], p["incarnation"]
    ),
    "VersionManifest": lambda p: Manifest(p["run_id"], p["version"], p["step"], p["state"] == "committed"),
}

_SKIPPED = frozenset({r.ReleaseCommand.__name__, r.DrainCommand.__name__})
"""Records on the topics of an audit that say nothing about anybody's fate."""

_AVRO_ERRORS = (EOFError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError)


_BELONGS = {topic.name: frozenset(kind.__name__ for kind in topic.records) for topic in TOPICS.values()}
_ANYTHING = frozenset(_KEPT) | _SKIPPED


class Peek:
    """Reads records of one codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._readers: dict[str, Any] = {}
        """Record -> its schema with the kept fields only, in fastavro's form."""
        self._read: Callable[..., Any] | None = None
        """fastavro's, once it is needed."""

    def read(self, value: bytes, topic: str) -> object:
        """One of this module's tuples; the record itself for the small ones; None: it does not matter.

        Raises DecodeError, also for a record that does not belong on its topic: nobody takes it; and what a registry
        raises.
        """
        written = self._codec.schema_of(value)
        if written is None:
            return self._codec.decode(value)
        name = written.name
        if topic in _BELONGS and name not in _BELONGS[topic]:
            raise DecodeError(f"a {name} does not belong on {topic}")
        if name not in _ANYTHING:
            return self._codec.decode(value)
        if name in _SKIPPED:
            return None
        try:
            return _MAKE[name](self._plain(value, written))
        except _AVRO_ERRORS as error:
            raise DecodeError(f"{written.label}: {type(error).__name__}: {error}") from error

    def whole(self, value: bytes) -> object:
        """The whole record. Raises DecodeError."""
        return self._codec.decode(value)

    def _plain(self, value: bytes, written: Written) -> Any:
        reader = self._readers.get(written.name)
        if reader is None or self._read is None:
            reader = self._prepare(written.name)
        assert self._read is not None
        body = BytesIO(value)
        body.seek(written.header_bytes)
        plain = self._read(body, written.schema, reader)
        if body.tell() != len(value):
            raise ValueError(f"{len(value) - body.tell()} bytes follow the record")
        return plain

    def _prepare(self, name: str) -> Any:
        from fastavro import parse_schema, schemaless_reader
        from fastavro.read import SchemaResolutionError

        def read(body: BytesIO, schema: Any, reader: Any) -> Any:
            try:
                return schemaless_reader(body, schema, reader)
            except SchemaResolutionError as error:
                raise ValueError(f"cannot be resolved to the schema of this release: {error}") from error

        self._read = read
        self._readers[name] = reader = parse_schema(_cut(PACKAGED.current(name).whole, _KEPT[name]))
        return reader


def _cut(schema: Mapping[str, Any], kept: _Fields) -> dict[str, Any]:
    """A record's schema with these fields only; their types must be spelled out in them."""
    fields = []
    for one in schema["fields"]:
        if one["name"] in kept:
            below = kept[one["name"]]
            fields.append({**one, "type": one["type"] if below is None else _cut(one["type"], below)})
    return {"type": "record", "namespace": schema["namespace"], "name": schema["name"], "fields": fields}
