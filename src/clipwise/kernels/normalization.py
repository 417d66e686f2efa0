"""Σ_t grad_t ⊙ x̂_t and Σ_t grad_t for every row, x̂ normalised over its last axis: the gradients of a scale and a shift, in one pass.

Plain operations write x̂ and its product with the gradient to memory before they add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator

WIDEST = 2**13  # numbers that are normalised together: a program holds them all
_TERMS = 16  # that a program adds up


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    grad, x, scales_out, shifts_out, terms, width, parts, eps, grad_row, grad_term, x_row, x_term,
    TERMS: tl.constexpr, WIDTH: tl.constexpr, IS_CENTRED: tl.constexpr,
):  # fmt: skip
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    column = tl.arange(0, WIDTH)
    scale = tl.zeros((WIDTH,), dtype=tl.float32)
    shift = tl.zeros((WIDTH,), dtype=tl.float32)
    for number in range(TERMS):
        term = (part * TERMS + number).to(tl.int64)
        inside = column < tl.where(term < terms, width, 0)
        numbers = tl.load(x + row * x_row + term * x_term + column, mask=inside, other=0.0).to(tl.float32)
        if IS_CENTRED:
            numbers = tl.where(inside, numbers - tl.sum(numbers, axis=0) / width, 0.0)
        rate = 1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=0) / width + eps)
        gradient = tl.load(grad + row * grad_row + term * grad_term + column, mask=inside, other=0.0).to(tl.float32)
        scale += tl.where(inside, gradient * numbers * rate, 0.0)
        shift += gradient
    place = tl.program_id(0).to(tl.int64) * width + column
    tl.store(scales_out + place, scale, mask=column < width)
    tl.store(shifts_out + place, shift, mask=column < width)


def normalized_sums(grad: Tensor, x: Tensor, eps: float, is_centred: bool) -> Tensor:
    """grad and x: (R, T, n) → (2, R, n) in float32: Σ_t grad ⊙ x̂ and Σ_t grad, added up in a fixed order"""
    return (_operator if is_tracing() else _run)(grad, x, eps, is_centred)


def _run(grad: Tensor, x: Tensor, eps: float, is_centred: bool) -> Tensor:
    grad, x = (side if side.stride(2) == 1 else side.contiguous() for side in (grad, x))
    rows, terms, width = grad.shape
    parts = triton.cdiv(terms, _TERMS)
    found = grad.new_empty(2, rows, parts, width, dtype=torch.float32)
    launch(
        _sums, (rows * parts,), grad, x, found[0], found[1], terms, width, parts, eps, *grad.stride()[:2], *x.stride()[:2],
        TERMS=_TERMS, WIDTH=triton.next_power_of_2(width), IS_CENTRED=is_centred, num_warps=4 if width <= 1024 else 8,
    )  # fmt: skip
    return found.sum(2)


_operator = operator("normalized_sums", _run)


@_operator.register_fake
def _(grad: Tensor, x: Tensor, eps: float, is_centred: bool) -> Tensor:
    return grad.new_empty(2, grad.shape[0], grad.shape[2], dtype=torch.float32)
