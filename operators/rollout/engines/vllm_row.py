"""One request in the vLLM engine: what was sampled of it, when it ends, and what was not said yet."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.schemas.records import FinishReason
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["Row", "seed_of"]

_LEAST = -math.inf


def seed_of(seed: int, n_sampled: int) -> int:
    """The seed of a generator that starts after ``n_sampled`` response tokens: unrelated for near arguments."""
    digest = hashlib.blake2b(f"{seed}:{n_sampled}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Row:
    """See the module's docstring. ``decode`` turns ids into text, for stop strings.

    ``add`` runs once for each row and step: it is written for that.
    """

    __slots__ = (
        "_before", "_decode", "_ids", "_logprobs", "_tail", "_version", "_window", "ended", "error", "finish", "limit",
        "n_response", "name", "preemptions", "request", "scheduled", "stops", "told_at",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        *,
        name: str,
        limit: int,
        stops: frozenset[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.request = request
        self.name = name
        """Of the request in vLLM: a trajectory that comes back has another one."""
        self.limit = limit
        """Response tokens at which it is full."""
        self.stops = stops
        """Tokens that end it."""
        self.n_response = request.sampled.n_tokens
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.ended = False
        """Nothing more is sampled."""
        self.scheduled: Any = None
        """vLLM's own record of it."""
        self.preemptions = 0
        """Seen so far."""
        self.told_at = 0.0
        """When something was taken, by the clock of whoever takes."""
        self._decode = decode
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._version = -1
        """Of these tokens."""
        self._before: list[Tokens] = []
        """Not said either, and of versions before that."""
        texts = request.sampling.stop
        self._window = max((len(text.encode()) for text in texts), default=0) + 4
        self._tail: list[int] | None = request.sampled.ids_T.tolist()[-self._window :] if texts else None
        sampled = request.sampled
        if sampled.n_tokens and int(sampled.ids_T[-1]) in stops:
            self._end("stop")
        elif self.n_response >= limit:
            self._end("length")

    def add(self, token: int, logprob: float, version: int) -> None:
        """Take a new token. Not when it has ended."""
        if version != self._version:
            self._set_aside()
            self._version = version
        if not _LEAST < logprob <= 0.0:  # NaN neither
            self.fail(f"logprob {logprob} at token {self.n_response}")
            return
        self._ids.append(token)
        self._logprobs.append(logprob)
        n = self.n_response = self.n_response + 1
        if token in self.stops or (self._tail is not None and self._stop_string(token)):
            self._end("stop")
        elif n >= self.limit:
            self._end("length")

    def fail(self, why: str) -> None:
        """It ends here, with an error."""
        self.error = why
        self.ended = True

    @property
    def untold(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ids or self._before or self.ended)

    def take(self) -> Delta | None:
        """What was not said yet; None when there is nothing to say."""
        if not self.untold:
            return None
        tokens = self._flush()
        if self._before:
            tokens = Tokens.concat([*self._before, tokens])
            self._before = []
        return Delta(trajectory_id=self.request.trajectory_id, tokens=tokens, finish=self.finish, error=self.error)

    def _end(self, finish: FinishReason) -> None:
        self.finish = finish
        self.ended = True

    def _set_aside(self) -> None:
        if self._ids:
            self._before.append(self._flush())

    def _flush(self) -> Tokens:
        n = len(self._ids)
        if not n:
            return EMPTY
        tokens = Tokens(
            n_tokens=n,
            ids=struct.pack(f"<{n}i", *self._ids),
            logprobs=struct.pack(f"<{n}f", *self._logprobs),
            versions=struct.pack("<i", self._version) * n,
            mask=b"\x01" * n,
        )
        self._ids.clear()
        self._logprobs.clear()
        return tokens

    def _stop_string(self, token: int) -> bool:
        """Whether this token completes one of the stop strings, also one that began before a resume."""
        self._tail = [*(self._tail or ()), token][-self._window :]
        text = self._decode(self._tail)
        return any(stop in text for stop in self.request.sampling.stop)
