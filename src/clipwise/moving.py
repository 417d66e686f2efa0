"""Calls that may move rows from one place in the batch to another, as the data or chance says.

Where the examples lie is remembered between steps, because ordinary torch calls treat every batch alike. Indexing does not:
sorting by length is the identity on one batch and a shuffle on the next, and so is dropping padding. If an index that varies
reaches along an axis that may hold the examples, nothing is remembered and every batch is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .marks import Marks

_ANYWHERE = {"masked_select", "_pack_padded_sequence", "repeat_interleave", "unique", "unique_consecutive", "nested_tensor", "take"}
_ALONG_DIM = {"index_select", "index_copy", "index_add", "index_fill", "index_reduce"}
_ROW_BY_ROW = {"gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", "sort", "msort", "topk"}
_BY_INDEX = {"__getitem__", "__setitem__", "index_put"}
MOVES = _ANYWHERE | _ALONG_DIM | _ROW_BY_ROW | _BY_INDEX
MOVES |= {f"{name}_" for name in MOVES if not name.startswith("_")}


@dataclass
class Moves:
    """What was indexed with something that varies: lengths of such axes, and axes of functions that keep rows apart otherwise."""

    anywhere: bool = False
    lengths: set[int] = field(default_factory=set)
    axes: set[tuple[int, int]] = field(default_factory=set)  # (axis, length)

    def may_reorder(self, batch: int, row_axes: Iterable[int]) -> bool:
        """Whether examples lying along `row_axes` may have been moved."""
        along = set(row_axes)
        return (
            self.anywhere
            or any(_holds(length, batch) for length in self.lengths)
            or any(axis in along and _holds(length, batch) for axis, length in self.axes)
        )

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> None:
        """A call of one of MOVES on example data."""
        plain = name.rstrip("_") if not name.startswith("_") else name
        source = args[0] if args else None
        if plain in _BY_INDEX:
            self._note_index(source, args[1] if len(args) > 1 else None, marks)
        elif not isinstance(source, Tensor):
            self.anywhere = True
        elif plain in _ANYWHERE:
            others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
            self.anywhere = self.anywhere or plain != "repeat_interleave" or any(map(marks.varies, others))
        elif source.dim():
            axis = _dim(plain, args, kwargs) % source.dim()
            if plain in _ROW_BY_ROW:
                self.axes.add((axis, source.shape[axis]))
            elif any(marks.varies(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)):
                self.lengths.add(source.shape[axis])

    def _note_index(self, source: Any, index: Any, marks: Marks) -> None:
        """x[order], x[:, order], x[mask]. Several index tensors go together: a fixed one as long as the batch holds the rows in place."""
        if not isinstance(source, Tensor):
            return
        items = index if isinstance(index, tuple) else (index,)
        used = sum(item.dim() if _is_mask(item) else 1 for item in items if item is not None and item is not Ellipsis and item is not True)
        axis = 0
        found: list[int] = []
        fixed: list[int] = []
        for item in items:
            if item is Ellipsis:
                axis += source.dim() - used
                continue
            if item is None:
                continue
            width = item.dim() if _is_mask(item) else 1
            if isinstance(item, Tensor | list):
                lengths = source.shape[axis : axis + width]
                varies = isinstance(item, list) or marks.varies(item)
                (found if varies else fixed).extend(lengths if isinstance(item, list) or item.dim() else [])
            axis += width
        if not any(length in fixed for length in source.shape[:1]):
            self.lengths.update(found)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _holds(length: int, batch: int) -> bool:
    return length >= batch and length % batch == 0


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    default = 0 if name == "msort" else -1
    place = 2 if name in ("topk", "take_along_dim") else 1
    given = kwargs.get("dim", args[place] if len(args) > place else default)
    return given if isinstance(given, int) and not isinstance(given, bool) else default
