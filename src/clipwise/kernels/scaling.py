"""Rows times weights, and their sum, in one pass. A row of weight zero counts for nothing, whatever it holds.

In a graph nobody looks whether an example is finite, so every row is guarded; plain operations take a copy for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator

_BLOCK = 1024  # numbers that a program reads at once
_COLUMNS, _ROWS = 256, 8  # … and of a sum, …
_FEW_COLUMNS, _MANY_ROWS, _SHORT = 16, 64, 2**16  # … of rows that would keep few programs busy


@triton.jit
def _scaled(rows, weights, scaled_out, length, stride, parts, BLOCK: tl.constexpr, IS_DROPPED_ONLY: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) // parts).to(tl.int64)
    at = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights + row)
    numbers = tl.load(rows + row * stride + at, mask=at < length, other=0.0).to(tl.float32)
    if not IS_DROPPED_ONLY:
        numbers = numbers * weight
    tl.store(scaled_out + row * length + at, tl.where(weight != 0, numbers, 0.0).to(scaled_out.dtype.element_ty), mask=at < length)


@triton.jit
def _weighted(rows, weights, sums_out, examples, length, stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, examples, ROWS):
        row = start + tl.arange(0, ROWS)
        weight = tl.load(weights + row, mask=row < examples, other=0.0)[:, None]
        inside = (row < examples)[:, None] & (at < length)[None, :]
        numbers = tl.load(rows + row.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(weight != 0, numbers * weight, 0.0), axis=0)
    tl.store(sums_out + at, total, mask=at < length)


def scaled_rows(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """weights[i]·rows[i], rounded once from float32. rows: (B, n), weights: (B,) in float32 → (B, n) of `dtype`"""
    return (_scaled_operator if is_tracing() else _scale)(rows, weights, dtype, False)


def kept_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """rows[i] where weights[i] is not zero, else zeros."""
    return (_scaled_operator if is_tracing() else _scale)(rows, weights, rows.dtype, True)


def weighted_row_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights[i]·rows[i], in float32 and a fixed order. rows: (B, n), weights: (B,) in float32 → (n,)"""
    return (_sum_operator if is_tracing() else _add)(rows, weights)


def _scale(rows: Tensor, weights: Tensor, dtype: torch.dtype, dropped_only: bool) -> Tensor:
    rows, weights = rows if rows.stride(1) == 1 else rows.contiguous(), weights.contiguous()
    scaled = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    parts = triton.cdiv(rows.shape[1], _BLOCK)
    grid = (rows.shape[0] * parts,)
    launch(_scaled, grid, rows, weights, scaled, rows.shape[1], rows.stride(0), parts, BLOCK=_BLOCK, IS_DROPPED_ONLY=dropped_only)
    return scaled


def _add(rows: Tensor, weights: Tensor) -> Tensor:
    rows, weights = rows if rows.stride(1) == 1 else rows.contiguous(), weights.contiguous()
    examples, length = rows.shape
    sums = torch.empty(length, dtype=torch.float32, device=rows.device)
    columns, at_once = (_COLUMNS, _ROWS) if length > _SHORT else (_FEW_COLUMNS, _MANY_ROWS)
    grid = (triton.cdiv(length, columns),)
    launch(_weighted, grid, rows, weights, sums, examples, length, rows.stride(0), COLUMNS=columns, ROWS=at_once)
    return sums


_scaled_operator = operator("scaled_rows", _scale)
_sum_operator = operator("weighted_row_sum", _add)


@_scaled_operator.register_fake
def _(rows: Tensor, weights: Tensor, dtype: torch.dtype, dropped_only: bool) -> Tensor:
    return rows.new_empty(rows.shape, dtype=dtype)


@_sum_operator.register_fake
def _(rows: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1], dtype=torch.float32)
