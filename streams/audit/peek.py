"""What an audit needs of a record, and no more: the other fields are skipped in the bytes, not decoded.

A peek checks that the bytes are one whole record of a known schema, and not the rules inside it. What only a full
decode can find wrong has its consumer's dead letter, which names the record by its place.

>>> Peek(Codec()).read(value)                                                           # doctest: +SKIP
Delta(trajectory_id='d/0/7/3', attempt=0, start=64, n_tokens=16)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


_Fields = Mapping[str, "_Fields | None"]

_DONE: _Fields = {
    "trajectory_id": None,
    "attempt": None,
    "response": {"n_tokens": None},
    "rollout_id": None,
    "version_min": None,
    "version_max": None,
}
_KEPT: Mapping[str, _Fields] = {
    "Prompt": dict.fromkeys(("prompt_id", "epoch", "purpose", "group_size", "min_version", "round_size")),
    "TrajectoryStarted": dict.fromkeys(("trajectory_id", "attempt", "rollout_id", "incarnation", "version")),
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
    )


_MAKE: Mapping[str, Callable[[Any], object]] = {
    "Prompt": lambda p: Admitted(
        p["prompt_id"], p["group_size"], p["purpose"] == "train", p["epoch"], p["round_size"], p["min_version"]
    ),
    "TrajectoryStarted": lambda p: Started(
        p["trajectory_id"], p["attempt"], p["rollout_id"], p["incarnation"], p["version"]
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


class Peek:
    """Reads records of one codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._readers: dict[str, Any] = {}
        """Record -> its schema with the kept fields only, in fastavro's form."""

    def read(self, value: bytes) -> object:
        """One of this module's tuples; the record itself for the small ones; None: it does not matter.

        Raises DecodeError, and what a registry raises.
        """
        written = self._codec.schema_of(value)
        if written is not None and written.name in _SKIPPED:
            return None
        if written is None or written.name not in _KEPT:
            return self._codec.decode(value)
        try:
            return _MAKE[written.name](self._plain(value, written))
        except _AVRO_ERRORS as error:
            raise DecodeError(f"{written.label}: {type(error).__name__}: {error}") from error

    def belongs(self, value: bytes, topic: str) -> None:
        """Raise DecodeError where the catalogue lets no record of this type stand on the topic: nobody takes it."""
        known, written = TOPICS.get(topic), self._codec.schema_of(value)
        if known is not None and written is not None and written.name not in {kind.__name__ for kind in known.records}:
            raise DecodeError(f"a {written.name} does not belong on {topic}")

    def whole(self, value: bytes) -> object:
        """The whole record. Raises DecodeError."""
        return self._codec.decode(value)

    def _plain(self, value: bytes, written: Written) -> Any:
        from fastavro import parse_schema

        reader = self._readers.get(written.name)
        if reader is None:
            whole = PACKAGED.current(written.name).whole
            reader = self._readers[written.name] = parse_schema(_cut(whole, _KEPT[written.name]))
        return written.read(value, reader)


def _cut(schema: Mapping[str, Any], kept: _Fields) -> dict[str, Any]:
    """A record's schema with these fields only; their types must be spelled out in them."""
    fields = []
    for one in schema["fields"]:
        if one["name"] in kept:
            below = kept[one["name"]]
            fields.append({**one, "type": one["type"] if below is None else _cut(one["type"], below)})
    return {"type": "record", "namespace": schema["namespace"], "name": schema["name"], "fields": fields}
