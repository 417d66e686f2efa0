"""Where the examples lie in a tensor: along which axes, and which rows belong to which example.

A *row* is one index along those axes. A layout that was recognised (`Layout`) holds for every batch size; one that could
only be measured (`Table`) holds for the batch it was measured on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def to_rows(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The axes that number rows moved to the front and made one; no axes: the whole tensor is one row."""
    if not axes:
        return tensor.unsqueeze(0)
    if axes == (0,):
        return tensor
    return tensor.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1)


def from_rows(rows: Tensor, axes: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Undo `to_rows` below one leading axis. rows: (n, R, ...) → (n, *shape)"""
    if not axes:
        return rows.squeeze(1)
    rows = rows.unflatten(1, [shape[axis] for axis in axes])
    return rows.movedim(tuple(range(1, len(axes) + 1)), tuple(axis + 1 for axis in axes))


@dataclass(frozen=True)
class Layout:
    """Every example has the same number k of rows. `block`: row r belongs to example r // k; `strided`: to r mod B.

    `single`: one row an example, in order. That says nothing of how more rows would be numbered.
    """

    axes: tuple[int, ...]
    order: str

    def fits(self, shape: torch.Size, batch: int) -> bool:
        """Whether this layout can be that of a tensor of this shape."""
        rows = math.prod(shape[axis] for axis in self.axes) if max(self.axes, default=-1) < len(shape) else -1
        return rows == batch if self.order == "single" else rows > 0 and rows % batch == 0

    def grouping(self, rows: int, batch: int) -> EvenGrouping:
        return EvenGrouping(rows, batch, self.order)


@dataclass(frozen=True, eq=False)
class Table:
    """Row r belongs to example table[r]; -1: its gradient was zero, it belongs to nobody."""

    axes: tuple[int, ...]
    table: Tensor  # (R,)

    def grouping(self, rows: int, batch: int) -> TableGrouping:
        return TableGrouping(self.table, batch)


def same_owners(first: Layout | Table, second: Layout | Table, shape: torch.Size, batch: int) -> bool:
    """Whether both give every entry of a tensor of this shape to the same example. What belongs to nobody may be anybody's."""
    a, b = torch.broadcast_tensors(*(_owners(place, shape, batch) for place in (first, second)))
    return bool(((a == b) | (a < 0) | (b < 0)).all())


def _owners(place: Layout | Table, shape: torch.Size, batch: int) -> Tensor:
    """Of each entry; axes that number no rows have length one."""
    lengths = [shape[axis] for axis in place.axes]
    owners = place.grouping(math.prod(lengths), batch).owners().cpu().view(lengths)
    in_order = sorted(range(len(lengths)), key=lambda number: place.axes[number])
    return owners.permute(in_order).reshape([length if axis in place.axes else 1 for axis, length in enumerate(shape)])


@dataclass(frozen=True)
class EvenGrouping:
    """Sorts (R, ...) into (B, k, ...) by a view."""

    rows: int
    batch: int
    order: str

    @property
    def is_trivial(self) -> bool:
        """Row i belongs to example i, and nothing else does."""
        return self.rows == self.batch

    def __call__(self, rows: Tensor) -> Tensor:
        per_example = rows.shape[0] // self.batch
        if self.order != "strided":
            return rows.unflatten(0, (self.batch, per_example))
        return rows.unflatten(0, (per_example, self.batch)).transpose(0, 1)

    def owners(self) -> Tensor:
        rows = torch.arange(self.rows)
        return rows % self.batch if self.order == "strided" else rows // (self.rows // self.batch)


class TableGrouping:
    """Sorts (R, ...) into (B, k, ...), k the most rows an example has; missing rows are zero."""

    is_trivial = False

    def __init__(self, table: Tensor, batch: int):
        self.batch = batch
        self.table = table
        owned = table >= 0
        counts = torch.bincount(table[owned], minlength=batch)
        width = max(int(counts.max()), 1) if len(counts) else 1
        order = torch.argsort(table, stable=True)[int((~owned).sum()) :]  # rows sorted by owner
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(order), device=table.device) - starts[table[order]]
        self._index = torch.full((batch, width), -1, device=table.device)
        self._index[table[order], place] = order

    def __call__(self, rows: Tensor) -> Tensor:
        index = self._index.to(rows.device)
        picked = rows[index.clamp(min=0)]  # (B, k, ...)
        return picked.masked_fill((index < 0).view(*index.shape, *[1] * (rows.dim() - 1)), 0)

    def owners(self) -> Tensor:
        return self.table
