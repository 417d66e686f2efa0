"""‖Σ_t row_t·e(id_t)‖² for every example: rows that share an id are added before they are squared. Nothing is written to memory, no order is left to chance.

Ids come sorted. A program goes through some columns of one example, a stretch of terms at a time, and adds the rows of each id; what belongs to
the last one is carried on to the next stretch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator

_TERMS, _COLUMNS = 32, 64  # of a stretch


@triton.jit
def _segment_squares(  # type: ignore[no-untyped-def]
    ids, order, rows, squares_out, terms, width, parts, rows_example, rows_term, TERMS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    example, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    column, place = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TERMS)
    carried = tl.zeros((COLUMNS,), dtype=tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float64)
    for start in range(0, terms, TERMS):
        term = start + place
        inside = term < terms
        id = tl.load(ids + example * terms + term, mask=inside, other=-1)
        before = tl.load(ids + example * terms + term - 1, mask=inside & (term > 0), other=-1)
        begins = inside & ((id != before) | (term == 0))
        number = tl.cumsum(begins.to(tl.int32), axis=0)  # of the id: 0 is the one that is carried on
        at = tl.load(order + example * terms + term, mask=inside, other=0)
        found = tl.load(
            rows + example * rows_example + at[:, None] * rows_term + column[None, :],
            mask=inside[:, None] & (column < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        last = tl.max(number, axis=0)
        for segment in range(last):  # these are complete
            whole = carried + tl.sum(tl.where((number == segment)[:, None], found, 0.0), axis=0)
            total += whole.to(tl.float64) * whole.to(tl.float64)
            carried = tl.zeros((COLUMNS,), dtype=tl.float32)
        carried += tl.sum(tl.where((number == last)[:, None], found, 0.0), axis=0)
    total += carried.to(tl.float64) * carried.to(tl.float64)
    tl.store(squares_out + tl.program_id(0), tl.sum(total, axis=0))


def segment_squares(ids: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    """ids: (B, T) sorted, order: (B, T) where each came from, rows: (B, T, d) → (B,) in float64"""
    return (_operator if is_tracing() else _run)(ids, order, rows)


def _run(ids: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    examples, terms, width = rows.shape
    parts = triton.cdiv(width, _COLUMNS)
    found = rows.new_empty(examples, parts, dtype=torch.float64)
    arguments = (ids.contiguous(), order.contiguous(), rows, found, terms, width, parts, *rows.stride()[:2])
    launch(_segment_squares, (examples * parts,), *arguments, TERMS=_TERMS, COLUMNS=_COLUMNS)
    return found.sum(1)


_operator = operator("segment_squares", _run)


@_operator.register_fake
def _(ids: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float64)
