"""The KV cache of a batch whose rows come and go.

A rectangle of rows and columns per layer, aligned on the right: the newest token of every row stands in the same
column, so one step writes one column, and a row of n tokens fills the n columns before it::

    row 0   . . . a b c d e            columns:  start ... end
    row 1   . . . . . . f g                      the next step writes column ``end``
    row 2   . h i j k l m n

Rows are dense (0 .. rows-1): who removes a row moves the last one into its place. When the right edge of the memory
is reached, the rectangle is copied to its left edge, and grows when it must: one copy for as many steps as it is wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

__all__ = ["RowCache"]

_LEAST_COLUMNS = 64
_LEAST_ROWS = 8


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values, (rows, heads, columns, head size) each, as transformers wants to see them."""

    def __init__(self, owner: RowCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this forward's keys and values; return all that it attends to."""
        del args, kwargs
        owner = self._owner
        if self.keys is None or self.values is None:
            self.keys, self.values = owner.zeros_like(key_states), owner.zeros_like(value_states)
            self.is_initialized = True
        end = owner.end
        if owner.filling is not None:
            slots, source = owner.filling
            first = end - key_states.shape[2]
            self.keys[slots, :, first:end] = key_states[source]
            self.values[slots, :, first:end] = value_states[source]
            return key_states, value_states
        rows = owner.rows
        self.keys[:rows, :, end] = key_states[:, :, 0]
        self.values[:rows, :, end] = value_states[:, :, 0]
        return self.keys[:rows, :, owner.start : end + 1], self.values[:rows, :, owner.start : end + 1]

    def get_seq_length(self) -> int:
        """Columns before the ones of this forward."""
        return 0 if self._owner.filling is not None else self._owner.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that this forward attends to, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def resize(self, rows: int, columns: int, end: int) -> None:
        """Into a new rectangle, the live part ending at column ``end``."""
        if self.keys is not None and self.values is not None:
            self.keys = self._owner.moved(self.keys, rows, columns, end)
            self.values = self._owner.moved(self.values, rows, columns, end)


class RowCache:
    """See the module's docstring. ``prepared_mask``: keep the additive mask, else one of zeros and ones."""

    def __init__(
        self, *, layers: int, max_rows: int, dtype: torch.dtype, device: torch.device, prepared_mask: bool
    ) -> None:
        self._max_rows = max_rows
        self._device = device
        self._prepared = prepared_mask
        self._mask_dtype = dtype if prepared_mask else torch.int64
        self._hidden = torch.finfo(dtype).min if prepared_mask else 0
        self._shown = 0 if prepared_mask else 1
        self._layers = [_Layer(self) for _ in range(layers)]
        self.view = Cache(layers=list(self._layers))
        """What the model is given."""
        self.filling: tuple[Tensor, Tensor] | None = None
        """While prompts are read: (slots, row of the forward that each slot copies)."""
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.rows = self.start = self.end = 0
        self._row_capacity = self._column_capacity = 0
        self._mask = torch.empty((0, 0), dtype=self._mask_dtype, device=self._device)
        for layer in self._layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.end - self.start

    def mask(self) -> Tensor:
        """The mask of the next step, whose column counts as seen; transformers' shape for it."""
        seen = self._mask[: self.rows, self.start : self.end + 1]
        return seen[:, None, None, :] if self._prepared else seen

    def reserve(self, new_rows: int, columns: int) -> None:
        """Make room for ``new_rows`` more rows of up to ``columns`` tokens."""
        rows = self.rows + new_rows
        width = max(self.width, columns)
        if rows > self._row_capacity or width >= self._column_capacity:
            self._resize(rows, width)
        elif self.rows == 0:
            self.start = self.end = columns
        elif self.end < columns:
            self._resize(rows, width)

    def open_column(self) -> None:
        """Make column ``end`` writable and seen by every row."""
        if self.end >= self._column_capacity:
            self._resize(self.rows, self.width)
        self._mask[: self.rows, self.end] = self._shown

    def close_column(self) -> None:
        """The step has written its column."""
        self.end += 1

    def add(self, lengths: Tensor, source: Tensor, columns: int) -> Tensor:
        """Open one row for each of ``lengths`` (N,), right of all others; the next forward fills them.

        ``source`` (N,): row of the forward that each one copies. ``columns``: width of the forward. ``reserve`` comes
        before it. Returns which tokens of the forward are real, (N, columns).
        """
        first = self.rows
        slots = torch.arange(first, first + len(lengths), device=self._device)
        self.filling = (slots, source)
        column = torch.arange(columns, device=self._device)
        seen = column >= columns - lengths[:, None]
        part = self._mask[first : first + len(lengths)]
        part[:, : self.end] = self._hidden
        part[:, self.end - columns : self.end] = torch.where(seen, self._shown, self._hidden).to(self._mask_dtype)
        return seen.long()

    def filled(self, longest: int) -> None:
        """The forward that fills the opened rows is through. ``longest``: tokens of the longest row, old or new."""
        assert self.filling is not None
        self.rows += len(self.filling[0])
        self.filling = None
        self.start = self.end - longest

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole rows onto others."""
        columns = slice(self.start, self.end)
        for source, target in zip(sources, targets, strict=True):
            self._mask[target, columns] = self._mask[source, columns]
        for layer in self._layers:
            for part in (layer.keys, layer.values):
                if part is not None:
                    for source, target in zip(sources, targets, strict=True):
                        part[target, :, columns] = part[source, :, columns]

    def shrink(self, rows: int, longest: int) -> None:
        """Keep the first ``rows`` rows, the longest of them with ``longest`` tokens."""
        self.rows = rows
        self.start = self.end - longest
        if rows == 0:
            self.start = self.end = 0

    def wipe(self, row: int) -> None:
        """Zero a row: what is not finite in it must not meet a later mask."""
        for layer in self._layers:
            for part in (layer.keys, layer.values):
                if part is not None:
                    part[row] = 0

    def zeros_like(self, states: Tensor) -> Tensor:
        """A layer's rectangle for such keys or values."""
        shape = (self._row_capacity, states.shape[1], self._column_capacity, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def moved(self, old: Tensor, rows: int, columns: int, end: int) -> Tensor:
        """``old`` in a rectangle of another size, its live part ending at ``end``."""
        new = torch.zeros((rows, old.shape[1], columns, old.shape[3]), dtype=old.dtype, device=old.device)
        new[: self.rows, :, end - self.width : end] = old[: self.rows, :, self.start : self.end]
        return new

    def _resize(self, rows: int, width: int) -> None:
        """A rectangle with room for ``rows`` rows, and as many steps ahead as it is wide."""
        if rows > self._row_capacity:
            rows = min(self._max_rows, max(_LEAST_ROWS, 2 * self._row_capacity, rows))
        else:
            rows = self._row_capacity
        columns = max(_LEAST_COLUMNS, 2 * width)
        self._rebuild(rows, columns, end=width)

    def _rebuild(self, rows: int, columns: int, end: int) -> None:
        mask = torch.full((rows, columns), self._hidden, dtype=self._mask_dtype, device=self._device)
        mask[: self.rows, end - self.width : end] = self._mask[: self.rows, self.start : self.end]
        for layer in self._layers:
            layer.resize(rows, columns, end)
        self._mask = mask
        width = self.width
        self._row_capacity, self._column_capacity = rows, columns
        self.start, self.end = end - width, end
