"""What must hold inside a record, beyond its types. Checked by the codec both ways.

A producer that breaks a rule is refused with the field and the reason (EncodeError); bytes that break one are a
dead letter (DecodeError). No rule looks outside the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from laminar.schemas import records as r
from laminar.schemas.errors import InvalidRecord
from laminar.schemas.tokens import Tokens, ids_view

__all__ = ["check_record"]


def check_record(record: r.Record, checked: r.Record | None = None) -> None:
    """Raise InvalidRecord, naming the field, unless the record's own rules hold.

    ``checked``: a record whose rules are known to hold; a trajectory that is scored need not be checked twice.
    """
    if checked is not None and isinstance(record, r.ScoredTrajectory) and record.trajectory is checked:
        _reward(record, "ScoredTrajectory")
        return
    rule = _RULES.get(type(record))
    if rule is not None:
        rule(record, type(record).__name__)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRecord(message)


def _at_least(least: int, value: int, where: str) -> None:
    if value < least:
        raise InvalidRecord(f"{where}: {value} is below {least}")


def _prompt(prompt: r.Prompt, where: str) -> None:
    n = prompt.n_prompt_tokens
    _at_least(0, n, f"{where}.n_prompt_tokens")
    _require(
        len(prompt.prompt_tokens) == 4 * n,
        f"{where}.prompt_tokens: {len(prompt.prompt_tokens)} bytes, but n_prompt_tokens={n} needs {4 * n}",
    )
    if n:
        _at_least(0, int(np.minimum.reduce(ids_view(prompt.prompt_tokens))), f"{where}.prompt_tokens")
    _at_least(1, prompt.group_size, f"{where}.group_size")
    _at_least(1, prompt.sampling.max_tokens, f"{where}.sampling.max_tokens")
    _at_least(0, prompt.min_version, f"{where}.min_version")


def _member(record: r.TrajectoryStarted | r.CompletedTrajectory | r.Snapshot, where: str) -> None:
    """The id, the member, the attempt and the prompt agree."""
    _prompt(record.prompt, f"{where}.prompt")
    expected = r.trajectory_id(record.prompt.prompt_id, record.member)
    _require(
        record.trajectory_id == expected,
        f"{where}.trajectory_id: {record.trajectory_id!r} is not member {record.member} of its prompt ({expected!r})",
    )
    _require(
        0 <= record.member < record.prompt.group_size,
        f"{where}.member: {record.member} is not within group_size={record.prompt.group_size}",
    )
    _at_least(0, record.attempt, f"{where}.attempt")


def _started(record: r.TrajectoryStarted, where: str) -> None:
    _member(record, where)
    _at_least(0, record.version, f"{where}.version")


def _tokens(record: r.TrajectoryTokens, where: str) -> None:
    record.tokens.check(f"{where}.tokens")
    _at_least(0, record.start, f"{where}.start")
    _at_least(0, record.attempt, f"{where}.attempt")


def _moved(record: r.TrajectoryMoved, where: str) -> None:
    _at_least(1, record.attempt, f"{where}.attempt")
    _at_least(0, record.n_tokens, f"{where}.n_tokens")


def _ended(record: r.TrajectoryEnded, where: str) -> None:
    _require(
        record.finish is not None or record.error is not None, f"{where}.error: an end without finish needs a reason"
    )
    _at_least(0, record.attempt, f"{where}.attempt")
    _at_least(0, record.n_tokens, f"{where}.n_tokens")


def _versions(tokens: Tokens, low: int, high: int, where: str) -> None:
    """The declared range is the range of the sampled tokens."""
    _at_least(0, low, f"{where}.version_min")
    _require(low <= high, f"{where}.version_max: {high} is below version_min={low}")
    found = tokens.version_range()
    if found is None:
        return
    oldest, newest = found
    _require(
        (low, high) == (oldest, newest),
        f"{where}.version_min, version_max: {low}, {high}, but the tokens carry {oldest} to {newest}",
    )


def _completed(record: r.CompletedTrajectory, where: str) -> None:
    _member(record, where)
    _require(
        record.group_id == record.prompt.prompt_id,
        f"{where}.group_id: {record.group_id!r} is not its prompt's id {record.prompt.prompt_id!r}",
    )
    record.response.check(f"{where}.response")
    _versions(record.response, record.version_min, record.version_max, where)


def _scored(record: r.ScoredTrajectory, where: str) -> None:
    _completed(record.trajectory, f"{where}.trajectory")
    _reward(record, where)


def _reward(record: r.ScoredTrajectory, where: str) -> None:
    if record.reward is None:
        _require(bool(record.failure), f"{where}.failure: a null reward needs a reason")
    else:
        _require(record.failure is None, f"{where}.failure: {record.failure!r} beside a reward of {record.reward}")
        _require(math.isfinite(record.reward), f"{where}.reward: {record.reward} is not finite")


def _manifest(record: r.VersionManifest, where: str) -> None:
    _at_least(0, record.version, f"{where}.version")
    _at_least(1, record.chunk_bytes, f"{where}.chunk_bytes")
    _require(
        len(record.chunk_digests) % 8 == 0,
        f"{where}.chunk_digests: {len(record.chunk_digests)} bytes, not a multiple of 8 (one xxh3-64 per chunk)",
    )
    for tensor in record.tensors:
        _require(
            min(tensor.offset, tensor.size) >= 0 and tensor.offset + tensor.size <= record.total_bytes,
            f"{where}.tensors: {tensor.name} at {tensor.offset} + {tensor.size}, outside {record.total_bytes} bytes",
        )

    for index, probe in enumerate(record.probes):
        _probe(probe, f"{where}.probes[{index}]")


def _probe(probe: r.Probe, where: str) -> None:
    _at_least(1, probe.top_k, f"{where}.top_k")
    n_prefixes = len(probe.lengths) // 4
    n_next = n_prefixes * probe.top_k
    for name, wanted in (("tokens", None), ("lengths", n_prefixes), ("ids", n_next), ("logprobs", n_next)):
        n_bytes = len(getattr(probe, name))
        _require(
            n_bytes == 4 * (n_bytes // 4 if wanted is None else wanted),
            f"{where}.{name}: {n_bytes} bytes, but "
            + ("4 per token" if wanted is None else f"{n_prefixes} prefixes and top_k={probe.top_k}")
            + " are needed",
        )
    if not n_prefixes:
        return
    lengths = probe.lengths_P
    _at_least(1, int(lengths.min()), f"{where}.lengths")
    longest, n_tokens = int(lengths.max()), len(probe.tokens) // 4
    _require(longest <= n_tokens, f"{where}.lengths: {longest} is above the {n_tokens} tokens of the sequence")
    _at_least(0, int(probe.tokens_L.min()), f"{where}.tokens")
    _at_least(0, int(probe.ids_PK.min()), f"{where}.ids")
    logprobs = probe.logprobs_PK
    _require(
        bool(np.isfinite(logprobs).all() and (logprobs <= 0).all()),
        f"{where}.logprobs: not all are finite and at most 0",
    )


def _adopt(record: r.AdoptCommand, where: str) -> None:
    snapshot = record.snapshot
    _member(snapshot, f"{where}.snapshot")
    snapshot.response.check(f"{where}.snapshot.response")
    _at_least(0, snapshot.version, f"{where}.snapshot.version")


def _step(record: r.TrainingStep, where: str) -> None:
    _at_least(1, record.step, f"{where}.step")
    _at_least(0, record.version, f"{where}.version")


_RULES: Mapping[type, Callable[[Any, str], None]] = {
    r.Prompt: _prompt,
    r.TrajectoryStarted: _started,
    r.TrajectoryTokens: _tokens,
    r.TrajectoryMoved: _moved,
    r.TrajectoryEnded: _ended,
    r.CompletedTrajectory: _completed,
    r.ScoredTrajectory: _scored,
    r.VersionManifest: _manifest,
    r.AdoptCommand: _adopt,
    r.TrainingStep: _step,
}
