"""What an engine's proxy and its process say to each other.

Commands go to the process: a head in JSON, and token buffers behind it. Reports come back: new tokens as packed
buffers, the counts of the engine at that moment, and perhaps the answer to a command. A token is 8 bytes (its id and
logprob) unless the tokens of a report are of several versions or masks.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from laminar.operators.rollout.engine import EngineRequest
from laminar.schemas.records import FinishReason, Sampling
from laminar.schemas.tokens import EMPTY, Tokens, ids_view

__all__ = ["Piece", "Report", "command", "gathered", "pack", "parse", "request_of", "submission", "unpack"]

_U32 = struct.Struct("<I")
_HEAD = struct.Struct("<qiiqqII??")
_FINISH: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))
_FINISH_CODE = {finish: code for code, finish in enumerate(_FINISH)}
_SAMPLING = tuple(one.name for one in fields(Sampling))


@dataclass(slots=True)
class Piece:
    """New tokens of one submission; see Delta."""

    number: int
    """Of the submission: the same trajectory may be submitted again."""
    tokens: Tokens
    finish: FinishReason | None = None
    error: str | None = None

    @property
    def ends(self) -> bool:
        """Nothing more comes."""
        return self.finish is not None or self.error is not None


@dataclass(slots=True, kw_only=True)
class Report:
    """One message of the process."""

    seen: int = 0
    """Submissions that it had taken."""
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    preempted: int = 0
    pieces: Sequence[Piece] = ()
    answer: Mapping[str, Any] = field(default_factory=dict)
    """One name and its value; empty: none."""


def command(name: str, *buffers: bytes, **values: Any) -> bytes:
    """A command with values that JSON knows, and buffers behind them."""
    head = json.dumps({"do": name, **values}).encode()
    return b"".join((_U32.pack(len(head)), head, *buffers))


def parse(message: bytes) -> tuple[Mapping[str, Any], memoryview]:
    """A command's head, and what lies behind it."""
    (n,) = _U32.unpack_from(message)
    return json.loads(message[_U32.size : _U32.size + n]), memoryview(message)[_U32.size + n :]


def submission(number: int, request: EngineRequest) -> bytes:
    """The command ``submit``."""
    tokens = request.sampled
    return command(
        "submit",
        array("i", request.prompt_ids).tobytes(),
        tokens.ids,
        tokens.logprobs,
        tokens.versions,
        tokens.mask,
        number=number,
        id=request.trajectory_id,
        seed=request.seed,
        sampling={name: getattr(request.sampling, name) for name in _SAMPLING},
        n_prompt=len(request.prompt_ids),
        n_sampled=tokens.n_tokens,
    )


def request_of(head: Mapping[str, Any], behind: memoryview) -> EngineRequest:
    """The request of a ``submit``."""
    n_prompt, n = head["n_prompt"], head["n_sampled"]
    sizes = (4 * n_prompt, 4 * n, 4 * n, 4 * n, n)
    parts = []
    at = 0
    for size in sizes:
        parts.append(bytes(behind[at : at + size]))
        at += size
    given = dict(head["sampling"])
    sampling = Sampling(**{**given, "stop_token_ids": tuple(given["stop_token_ids"]), "stop": tuple(given["stop"])})
    return EngineRequest(
        trajectory_id=head["id"],
        prompt_ids=tuple(ids_view(parts[0]).tolist()),
        sampled=Tokens(n_tokens=n, ids=parts[1], logprobs=parts[2], versions=parts[3], mask=parts[4]) if n else EMPTY,
        sampling=sampling,
        seed=head["seed"],
    )


def gathered(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """One for each submission."""
    by_number: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_number.setdefault(piece.number, []).append(piece)
    if len(by_number) == len(pieces):
        return pieces
    return [
        Piece(number, Tokens.concat(piece.tokens for piece in mine), mine[-1].finish, mine[-1].error)
        for number, mine in by_number.items()
    ]


def pack(report: Report) -> bytes:
    """A report as bytes."""
    pieces = report.pieces
    n = len(pieces)
    spoken = [piece.tokens for piece in pieces if piece.tokens.n_tokens]
    first = spoken[0].versions[:4] if spoken else b""
    one_version = all(tokens.versions == first * tokens.n_tokens for tokens in spoken)
    all_sampled = all(tokens.mask.count(1) == tokens.n_tokens for tokens in spoken)
    errors = {at: piece.error for at, piece in enumerate(pieces) if piece.error is not None}
    tail = json.dumps([report.answer, errors]).encode() if report.answer or errors else b""
    head = _HEAD.pack(
        report.seen, report.running, report.waiting, report.kv_used, report.preempted,
        n, len(tail), one_version, all_sampled,
    )  # fmt: skip
    return b"".join(
        (
            head,
            struct.pack(f"<{n}q", *(piece.number for piece in pieces)),
            struct.pack(f"<{n}i", *(piece.tokens.n_tokens for piece in pieces)),
            bytes(_FINISH_CODE[piece.finish] for piece in pieces),
            *(tokens.ids for tokens in spoken),
            *(tokens.logprobs for tokens in spoken),
            *((first,) if one_version else (tokens.versions for tokens in spoken)),
            *(() if all_sampled else (tokens.mask for tokens in spoken)),
            tail,
        )
    )


def unpack(message: bytes) -> Report:
    """The report that ``pack`` made these bytes of."""
    seen, running, waiting, kv_used, preempted, n, n_tail, one_version, all_sampled = _HEAD.unpack_from(message)
    answer, errors = json.loads(message[-n_tail:]) if n_tail else ({}, {})
    pieces: list[Piece] = []
    if n:
        at = _HEAD.size
        numbers = struct.unpack_from(f"<{n}q", message, at)
        at += 8 * n
        counts = struct.unpack_from(f"<{n}i", message, at)
        at += 4 * n
        codes = message[at : at + n]
        ids_at = at + n
        total = sum(counts)
        logprobs_at = ids_at + 4 * total
        versions_at = logprobs_at + 4 * total
        mask_at = versions_at + (4 if one_version else 4 * total)
        version = message[versions_at : versions_at + 4]
        done = 0
        for number, count, code in zip(numbers, counts, codes, strict=True):
            tokens = EMPTY
            if count:
                begin, end = 4 * done, 4 * (done + count)
                tokens = Tokens(
                    n_tokens=count,
                    ids=message[ids_at + begin : ids_at + end],
                    logprobs=message[logprobs_at + begin : logprobs_at + end],
                    versions=version * count if one_version else message[versions_at + begin : versions_at + end],
                    mask=b"\x01" * count if all_sampled else message[mask_at + done : mask_at + done + count],
                )
                done += count
            pieces.append(Piece(number, tokens, _FINISH[code]))
        for place, error in errors.items():
            pieces[int(place)].error = error
    return Report(
        seen=seen, running=running, waiting=waiting, kv_used=kv_used, preempted=preempted, pieces=pieces, answer=answer
    )
