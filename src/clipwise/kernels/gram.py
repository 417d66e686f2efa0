"""‖Σ_t left_t ⊗ right_t‖² = Σ_st ⟨left_s, left_t⟩·⟨right_s, right_t⟩ for every example, without writing the products to memory; and Σ_t ‖left_t‖·‖right_t‖.

A program forms the products of one tile of terms with another, on or above the diagonal, by products added in float32: exact ones of bf16
and float16, of float32 three of TF32 each (which parts of it they leave out, factors/inner.py bounds). What programs found is added up in
float64, in a fixed order. On the diagonal lie the norms of the terms, so their sum comes for nothing.

Float32 has no room for products below 2⁻¹²⁶: a sum of p of them, three times that many of TF32, may miss 3p·2⁻¹²⁶ < ε_p² = 4p·2⁻¹²⁶. (What TF32
leaves of a number may vanish, too: a term that is off by √p·2⁻¹²⁶, far below ε_p.) What this can take away from a norm is added to it, and to the mass:
ε_p·Σ‖right_t‖ + ε_d·Σ‖left_t‖ + T·2⁻⁶³, some 10⁻¹⁵ for numbers as they come. Nor has it room for products beyond 2¹²⁸: an example whose
terms pass 10¹⁹ counts as not finite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from . import GRAM_COLUMNS
from .launch import launch
from .operators import operator
from .outer import precision_of

_AT_ONCE = 32  # numbers of programs that are added at once
_ROUNDED_UP = 1.001  # roots in float32, and their sums


@triton.jit
def _products(side, firsts, seconds, terms, width, term, column, PRECISION: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """⟨side_s, side_t⟩ for s in `firsts`, t in `seconds`. Tensor cores add STEP columns, which they do coarsely; those sums are added by others."""
    less = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, width, STEP):
        at = start + tl.arange(0, STEP)
        a = tl.load(side + firsts[:, None] * term + at[None, :] * column, mask=(firsts < terms)[:, None] & (at < width)[None, :], other=0.0)
        b = tl.load(
            side + at[:, None] * column + seconds[None, :] * term, mask=(at < width)[:, None] & (seconds < terms)[None, :], other=0.0
        )
        less -= tl.dot(a, b, input_precision=PRECISION)  # added, a compiler would have tensor cores do it
    return 0.0 - less


@triton.jit
def _gram(  # type: ignore[no-untyped-def]
    left, right, inner_out, masses_out, lefts_out, rights_out, terms, p, d, tiles, pairs,
    left_row, left_term, left_column, right_row, right_term, right_column, PRECISION: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row, pair = (tl.program_id(0) // pairs).to(tl.int64), tl.program_id(0) % pairs
    second = ((tl.sqrt((8 * pair + 1).to(tl.float32)) - 1.0) / 2.0).to(tl.int32)  # pairs in the order (0,0) (0,1) (1,1) (0,2) …
    second = tl.where(second * (second + 1) // 2 > pair, second - 1, second)
    second = tl.where((second + 1) * (second + 2) // 2 <= pair, second + 1, second)
    first = pair - second * (second + 1) // 2
    firsts = (first * TILE + tl.arange(0, TILE)).to(tl.int64)
    seconds = (second * TILE + tl.arange(0, TILE)).to(tl.int64)
    lefts = _products(left + row * left_row, firsts, seconds, terms, p, left_term, left_column, PRECISION, TILE, STEP)
    rights = _products(right + row * right_row, firsts, seconds, terms, d, right_term, right_column, PRECISION, TILE, STEP)
    total = tl.sum(tl.sum(lefts * rights, axis=1), axis=0).to(tl.float64)  # may double where a float32 may not
    tl.store(inner_out + row * pairs + pair, tl.where(first == second, total, 2 * total))
    if first == second:
        diagonal = tl.arange(0, TILE)[:, None] == tl.arange(0, TILE)[None, :]
        left_norms = tl.sqrt(tl.sum(tl.where(diagonal, lefts, 0.0), axis=1))
        right_norms = tl.sqrt(tl.sum(tl.where(diagonal, rights, 0.0), axis=1))
        place = row * tiles + first
        tl.store(masses_out + place, tl.sum(left_norms * right_norms, axis=0))
        tl.store(lefts_out + place, tl.sum(left_norms, axis=0))
        tl.store(rights_out + place, tl.sum(right_norms, axis=0))


@triton.jit
def _total(numbers, count, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((AT_ONCE,), dtype=tl.float64)
    for start in range(0, count, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        total += tl.load(numbers + at, mask=at < count, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    inner, masses, lefts, rights, found_out, tiles, pairs, examples, missed_left, missed_right, missed, rounded_up, AT_ONCE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    square = _total(inner + row * pairs, pairs, AT_ONCE)
    mass = _total(masses + row * tiles, tiles, AT_ONCE)
    left = _total(lefts + row * tiles, tiles, AT_ONCE)
    right = _total(rights + row * tiles, tiles, AT_ONCE)
    lost = (missed_left * right + missed_right * left + missed) * rounded_up
    is_rounding = (square < 0) & (square > -1e300)  # −∞ is no rounding, but products too large for float32
    tl.store(found_out + row, tl.where(is_rounding, 0.0, square) + lost * lost)
    tl.store(found_out + examples + row, mass * rounded_up + lost)


def gram_squares(left: Tensor, right: Tensor, tile: int) -> Tensor:
    """left: (B, T, p), right: (B, T, d) → (2, B) in float64: squared norms, and masses"""
    return (_operator if is_tracing() else _run)(left, right, tile)


def _run(left: Tensor, right: Tensor, tile: int) -> Tensor:
    examples, terms, p = left.shape
    d = right.shape[-1]
    tiles = triton.cdiv(terms, tile)
    pairs = tiles * (tiles + 1) // 2
    inner = left.new_empty(examples * pairs, dtype=torch.float64)
    masses, lefts, rights = (left.new_empty(examples * tiles, dtype=torch.float32) for _ in range(3))
    found = left.new_empty(2, examples, dtype=torch.float64)
    arguments: tuple[Any, ...] = (
        left, right, inner, masses, lefts, rights, terms, p, d, tiles, pairs, *left.stride(), *right.stride(),
    )  # fmt: skip
    missed = [math.sqrt(4 * width) * 2.0**-63 for width in (p, d)]
    rounded_up = _ROUNDED_UP + 4 * max(p, d) * 2.0**-24
    precision = precision_of(left, tf32=False)
    launch(_gram, (examples * pairs,), *arguments, PRECISION=precision, TILE=tile, STEP=GRAM_COLUMNS, num_warps=8 if tile > 64 else 4)
    sums = (inner, masses, lefts, rights, found, tiles, pairs, examples, *missed, terms * 2.0**-63, rounded_up)
    launch(_add_up, (examples,), *sums, AT_ONCE=_AT_ONCE)
    return found


_operator = operator("gram_squares", _run)


@_operator.register_fake
def _(left: Tensor, right: Tensor, tile: int) -> Tensor:
    return left.new_empty(2, left.shape[0], dtype=torch.float64)
