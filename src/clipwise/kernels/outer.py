"""‖Σ_t left_t ⊗ right_t‖² for every example, without writing any of these matrices to memory.

A program forms one tile of one example's matrix, adding over t in float32, and keeps the sum of its squares: relative to the tile's
largest entry, so that nothing overflows or vanishes. What programs found is added up in float64, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator


@triton.jit
def tile_squares(acc, largest_out, squares_out, place):  # type: ignore[no-untyped-def]
    """Σ (acc/m)² and m = max |acc|. A tile with NaN or Inf gives NaN."""
    largest = tl.max(tl.max(tl.abs(acc), axis=1), axis=0)
    scaled = acc / tl.where(largest > 0, largest, 1.0)
    tl.store(largest_out + place, largest)
    tl.store(squares_out + place, tl.sum(tl.sum(scaled * scaled, axis=1), axis=0))


@triton.jit
def _outer_squares(  # type: ignore[no-untyped-def]
    left, right, largest_out, squares_out, terms, p, d,
    left_row, left_term, left_column, right_row, right_term, right_column,
    PRECISION: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(d, TILE)
    each = tl.cdiv(p, TILE) * tiles
    row, tile = (tl.program_id(0) // each).to(tl.int64), tl.program_id(0) % each
    lefts = ((tile // tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
    rights = ((tile % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
    left += row * left_row
    right += row * right_row
    acc = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, terms, STEP):
        at = (start + tl.arange(0, STEP)).to(tl.int64)
        inside = at < terms
        a = tl.load(left + lefts[:, None] * left_column + at[None, :] * left_term, mask=(lefts < p)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            right + at[:, None] * right_term + rights[None, :] * right_column, mask=inside[:, None] & (rights < d)[None, :], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tile_squares(acc, largest_out, squares_out, tl.program_id(0))


def precision_of(tensor: Tensor, tf32: bool) -> str:
    """How float32 is multiplied: in TF32 where that is switched on, else in three products of it, which are as good as float32."""
    return "tf32" if tf32 and tensor.dtype == torch.float32 else "tf32x3" if tensor.dtype == torch.float32 else "ieee"


def added_up(largest: Tensor, squares: Tensor, examples: int) -> Tensor:
    """(B,) in float64, from what programs found: (B·n) each."""
    return (largest.double().square() * squares.double()).view(examples, -1).sum(1)


def outer_squares(left: Tensor, right: Tensor, tile: int, tf32: bool) -> Tensor:
    """left: (B, G, T, p), right: (B, G, T, d) → (B,) in float64, added over G"""
    return (_operator if is_tracing() else _run)(left, right, tile, tf32)


def _run(left: Tensor, right: Tensor, tile: int, tf32: bool) -> Tensor:
    examples, blocks, terms, p = left.shape
    d = right.shape[-1]
    left, right = left.flatten(0, 1), right.flatten(0, 1)
    tiles = triton.cdiv(p, tile) * triton.cdiv(d, tile)
    largest, squares = (left.new_empty(examples * blocks * tiles, dtype=torch.float32) for _ in range(2))
    arguments: tuple[Any, ...] = (left, right, largest, squares, terms, p, d, *left.stride(), *right.stride())
    step = 16 if terms <= 16 else 32
    launch(_outer_squares, (examples * blocks * tiles,), *arguments, PRECISION=precision_of(left, tf32), TILE=tile, STEP=step)
    return added_up(largest, squares, examples)


_operator = operator("outer_squares", _run)


@_operator.register_fake
def _(left: Tensor, right: Tensor, tile: int, tf32: bool) -> Tensor:
    return left.new_empty(left.shape[0], dtype=torch.float64)
