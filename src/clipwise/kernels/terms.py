"""Σ_t ‖left_t‖·‖right_t‖ for every example, in float64, in one pass over both."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator

_TERMS, _COLUMNS = 8, 256  # that a program reads at once


@triton.jit
def _norms(side, at, terms, width, term, column, TERMS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    squares = tl.zeros((TERMS, COLUMNS), dtype=tl.float64)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (at < terms)[:, None] & (columns < width)[None, :]
        numbers = tl.load(side + at[:, None] * term + columns[None, :] * column, mask=inside, other=0.0).to(tl.float64)
        squares += numbers * numbers
    return tl.sqrt(tl.sum(squares, axis=1))


@triton.jit
def _masses(  # type: ignore[no-untyped-def]
    left, right, masses_out, terms, p, d, parts, left_row, left_term, left_column, right_row, right_term, right_column,
    TERMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    at = (part * TERMS + tl.arange(0, TERMS)).to(tl.int64)
    lefts = _norms(left + row * left_row, at, terms, p, left_term, left_column, TERMS, COLUMNS)
    rights = _norms(right + row * right_row, at, terms, d, right_term, right_column, TERMS, COLUMNS)
    tl.store(masses_out + tl.program_id(0), tl.sum(lefts * rights, axis=0))


def masses(left: Tensor, right: Tensor) -> Tensor:
    """left: (R, T, p), right: (R, T, d) → (R,) in float64"""
    return (_operator if is_tracing() else _run)(left, right)


def _run(left: Tensor, right: Tensor) -> Tensor:
    rows, terms, p = left.shape
    parts = triton.cdiv(terms, _TERMS)
    found = left.new_empty(rows, parts, dtype=torch.float64)
    arguments: tuple[Any, ...] = (left, right, found, terms, p, right.shape[-1], parts, *left.stride(), *right.stride())
    launch(_masses, (rows * parts,), *arguments, TERMS=_TERMS, COLUMNS=_COLUMNS)
    return found.sum(1)


_operator = operator("masses", _run)


@_operator.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], dtype=torch.float64)
