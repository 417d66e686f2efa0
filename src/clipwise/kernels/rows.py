"""‖row‖² for every row of a matrix, in float64, in one pass over it. (torch copies the whole matrix to float64 first.)"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator

_BLOCK = 1024  # numbers that a program reads at once
_LOOPS = 8  # times that it does so, in long rows


@triton.jit
def _row_squares(rows, squares_out, length, stride, parts, BLOCK: tl.constexpr, LOOPS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for loop in range(LOOPS):
        at = (part * LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(rows + row * stride + at, mask=at < length, other=0.0).to(tl.float64)
        total += number * number
    tl.store(squares_out + tl.program_id(0), tl.sum(total, axis=0))


def row_squares(rows: Tensor) -> Tensor:
    """rows: (R, n) → (R,) in float64, added up in a fixed order. Nothing overflows; a row with NaN or Inf is not finite."""
    return _operator(rows) if is_tracing() else _run(rows)


def _run(rows: Tensor) -> Tensor:
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    length = rows.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(length))
    loops = _LOOPS if length > 2 * _BLOCK else triton.cdiv(length, block)
    parts = triton.cdiv(length, block * loops)
    squares = rows.new_empty(rows.shape[0], parts, dtype=torch.float64)
    launch(_row_squares, (rows.shape[0] * parts,), rows, squares, length, rows.stride(0), parts, BLOCK=block, LOOPS=loops)
    return squares.sum(1) if parts > 1 else squares[:, 0]


_operator = operator("row_squares", _run)


@_operator.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float64)
