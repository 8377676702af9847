"""One request in the vLLM engine: what was sampled of it, when it ends, and what was not said yet."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.schemas.records import FinishReason
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["Row", "seed_of"]


def seed_of(seed: int, n_sampled: int) -> int:
    """The seed of a generator that starts after ``n_sampled`` response tokens: unrelated for near arguments."""
    digest = hashlib.blake2b(f"{seed}:{n_sampled}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Row:
    """See the module's docstring. ``decode`` turns ids into text, for stop strings."""

    __slots__ = (
        "_decode", "_ids", "_logprobs", "_tail", "_versions", "_window", "error", "finish", "limit",
        "n_response", "name", "preemptions", "request", "stops",
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
        self.preemptions = 0
        """Seen so far."""
        self._decode = decode
        self._ids = array("i")
        self._logprobs = array("f")
        self._versions = array("i")
        texts = request.sampling.stop
        self._window = max((len(text.encode()) for text in texts), default=0) + 4
        self._tail: list[int] = request.sampled.ids_T.tolist()[-self._window :] if texts else []
        sampled = request.sampled
        if sampled.n_tokens and int(sampled.ids_T[-1]) in stops:
            self.finish = "stop"
        elif self.n_response >= limit:
            self.finish = "length"

    @property
    def ended(self) -> bool:
        """Nothing more is sampled."""
        return self.finish is not None or self.error is not None

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Take new tokens, up to the one that ends it."""
        for token, logprob in zip(ids, logprobs, strict=True):
            if self.ended:
                return
            if not (math.isfinite(logprob) and logprob <= 0):
                self.error = f"logprob {logprob} at token {self.n_response}"
                return
            self._ids.append(token)
            self._logprobs.append(logprob)
            self._versions.append(version)
            self.n_response += 1
            if token in self.stops or self._stop_string(token):
                self.finish = "stop"
            elif self.n_response >= self.limit:
                self.finish = "length"

    def take(self) -> Delta | None:
        """What was not said yet; None when there is nothing to say."""
        if not self._ids and not self.ended:
            return None
        return Delta(
            trajectory_id=self.request.trajectory_id, tokens=self._flush(), finish=self.finish, error=self.error
        )

    def _flush(self) -> Tokens:
        n = len(self._ids)
        if not n:
            return EMPTY
        tokens = Tokens(
            n_tokens=n,
            ids=np.asarray(self._ids, dtype="<i4").tobytes(),
            logprobs=np.asarray(self._logprobs, dtype="<f4").tobytes(),
            versions=np.asarray(self._versions, dtype="<i4").tobytes(),
            mask=b"\x01" * n,
        )
        for part in (self._ids, self._logprobs, self._versions):
            del part[:]
        return tokens

    def _stop_string(self, token: int) -> bool:
        """Whether this token completes one of the stop strings, also one that began before a resume."""
        texts = self.request.sampling.stop
        if not texts:
            return False
        self._tail = [*self._tail, token][-self._window :]
        text = self._decode(self._tail)
        return any(stop in text for stop in texts)
