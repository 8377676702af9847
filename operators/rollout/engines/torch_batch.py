"""The rows that are decoded together: what is known of each one, as arrays over rows.

Rows are dense and in the same order as those of the cache. Between two flushes the new tokens of a row stand in a
matrix; no Python object is made for a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.torch_sampler import Draw, stream_key, uniforms
from laminar.schemas.records import FinishReason
from laminar.schemas.tokens import EMPTY, Tokens

__all__ = ["Batch", "Row"]


class Row:
    """One request, waiting or running."""

    __slots__ = ("_parts", "born", "key", "limit", "n_prompt", "n_tokens", "request", "stops", "tail")

    def __init__(self, request: EngineRequest, *, limit: int, stops: frozenset[int], born: int) -> None:
        prompt = np.asarray(request.prompt_ids, dtype=np.int32)
        self.request = request
        self.limit = limit
        """Response tokens at which it is full."""
        self.stops = stops
        """Tokens that end it."""
        self.born = born
        """Order of submission: the youngest is preempted first."""
        self.key = stream_key(request.seed)
        self.n_prompt = len(prompt)
        self.n_tokens = self.n_prompt + request.sampled.n_tokens
        """Prompt and response, without what was not flushed yet."""
        self.tail: list[int] = request.sampled.ids_T.tolist() if request.sampling.stop else []
        """Response tokens, kept only for a row with stop strings."""
        self._parts = [prompt, request.sampled.ids_T]

    @property
    def n_response(self) -> int:
        """Response tokens, without what was not flushed yet."""
        return self.n_tokens - self.n_prompt

    def ids(self) -> NDArray[np.int32]:
        """Prompt and response, (n_tokens,)."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def extend(self, ids: NDArray[np.int32]) -> None:
        """These response tokens were flushed."""
        self._parts.append(ids)
        self.n_tokens += len(ids)

    def finished(self) -> FinishReason | None:
        """Why nothing is left to sample, for a request that comes with a whole response."""
        sampled = self.request.sampled
        if sampled.n_tokens and int(sampled.ids_T[-1]) in self.stops:
            return "stop"
        return "length" if self.n_response >= self.limit else None


class Batch:
    """Up to ``max_rows`` rows, each with room for ``steps`` tokens between two flushes."""

    def __init__(self, max_rows: int, steps: int) -> None:
        self.rows: list[Row] = []
        self.n_tokens = np.zeros(max_rows, dtype=np.int64)
        """Prompt and response tokens of each row; the last one is not in the cache yet."""
        self.n_response = np.zeros(max_rows, dtype=np.int64)
        self.last = np.zeros(max_rows, dtype=np.int64)
        """The newest token of each row."""
        self._limit = np.zeros(max_rows, dtype=np.int64)
        self._key = np.zeros(max_rows, dtype=np.uint64)
        self._temperature = np.ones(max_rows, dtype=np.float32)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._stops = np.full((max_rows, 1), -1, dtype=np.int64)
        self._fresh = np.zeros(max_rows, dtype=np.int64)
        """Tokens since the last flush."""
        self._ids = np.zeros((max_rows, steps), dtype=np.int32)
        self._logprobs = np.zeros((max_rows, steps), dtype=np.float32)
        self._index = np.arange(max_rows)

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: Row) -> None:
        """A row whose tokens are all in the cache; it comes last."""
        at = len(self.rows)
        self.rows.append(row)
        sampling = row.request.sampling
        self.n_tokens[at] = row.n_tokens
        self.n_response[at] = row.n_response
        self._limit[at] = row.limit
        self._key[at] = row.key
        self._temperature[at] = sampling.temperature
        self._top_p[at] = sampling.top_p
        self._top_k[at] = sampling.top_k
        self._min_p[at] = sampling.min_p
        self._fresh[at] = 0
        if len(row.stops) > self._stops.shape[1]:
            more = len(row.stops) - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=-1)
        self._stops[at] = -1
        self._stops[at, : len(row.stops)] = sorted(row.stops)

    def draw(self, first: int) -> tuple[Draw, NDArray[np.float64]]:
        """How rows ``first`` and later are drawn, and the uniform number of each."""
        part = slice(first, len(self.rows))
        drawn = Draw(
            temperature=self._temperature[part],
            top_p=self._top_p[part],
            top_k=self._top_k[part],
            min_p=self._min_p[part],
        )
        return drawn, uniforms(self._key[part], self.n_response[part])

    def record(
        self, first: int, ids: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """One new token for rows ``first`` and later. Which of these (stopped, are full, drew from no distribution)?

        A token without a finite logprob is not kept.
        """
        part = slice(first, len(self.rows))
        bad = ~np.isfinite(logprobs)
        self._ids[self._index[part], self._fresh[part]] = ids
        self._logprobs[self._index[part], self._fresh[part]] = logprobs
        self.last[part] = ids
        for count in (self._fresh, self.n_tokens, self.n_response):
            count[part] += ~bad
        stopped = (ids[:, None] == self._stops[part]).any(axis=1)
        return stopped, self.n_response[part] >= self._limit[part], bad

    def flush(self, at: int, version: int) -> Tokens:
        """The new tokens of a row since the last flush; its Row knows them from here on."""
        n = int(self._fresh[at])
        if n == 0:
            return EMPTY
        ids = self._ids[at, :n].copy()
        self.rows[at].extend(ids)
        self._fresh[at] = 0
        return Tokens(
            n_tokens=n,
            ids=ids.astype("<i4", copy=False).tobytes(),
            logprobs=self._logprobs[at, :n].astype("<f4", copy=False).tobytes(),
            versions=version.to_bytes(4, "little", signed=True) * n,
            mask=b"\x01" * n,
        )

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove flushed rows; the last ones move into their places. Returns the moves as (sources, targets)."""
        leaving = set(gone)
        left = len(self.rows) - len(leaving)
        targets = [at for at in sorted(leaving) if at < left]
        sources = [at for at in range(left, len(self.rows)) if at not in leaving]
        if sources:
            for array in (
                self.n_tokens, self.n_response, self.last, self._limit, self._key, self._temperature, self._top_p,
                self._top_k, self._min_p, self._stops, self._fresh, self._ids, self._logprobs,
            ):  # fmt: skip
                array[targets] = array[sources]
            for source, target in zip(sources, targets, strict=True):
                self.rows[target] = self.rows[source]
        del self.rows[left:]
        return sources, targets

    def longest(self) -> int:
        """Tokens in the cache of the longest row; 0 without rows."""
        return int(self.n_tokens[: len(self.rows)].max()) - 1 if self.rows else 0
