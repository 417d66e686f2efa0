"""Matrix products with a weight (paper, Section 5.1): linear, matmul and its relatives, addmm, bilinear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import Dense, Factor, Outer
from ..layout import from_rows, to_rows
from ..registry import Call, Factors, Use, own_rule, rewrite
from .spread import spread_factor
from .stacked import check_operands, stacked_factor

_PRODUCTS: list[Any] = [
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.linalg.matmul,
]
_PRODUCTS_OF_VECTORS: list[Any] = [torch.mv, torch.dot, torch.Tensor.mv, torch.Tensor.dot]  # autocast leaves some of them alone


def _operands(use: Use) -> list[Any]:
    """The two factors of a product, whatever their names."""
    return use.operands("input", "self", "other", "mat2", "vec", "tensor", "vec2")[:2]


def _linear_reads(use: Use) -> list[Tensor]:
    x, weight, _ = use.bind("input", "weight", "bias")
    return [x] if use.tracks(weight) else [weight] if use.tracks(x) else []


def _linear_row_axes(use: Use, dims: int) -> tuple[int, ...]:
    """All axes but the features; if the *input* is a weight (prototypes against encoded examples), the features are the rows."""
    x, weight = use.bind("input", "weight")
    return (dims - 1,) if use.tracks(x) else tuple(range(dims - weight.dim() + 1))


@own_rule(F.linear, row_axes=_linear_row_axes, reads=_linear_reads, is_product=True)
def linear(call: Call) -> Factors:
    """y = x Wᵀ + b: W's gradient is Σ_t dL/dy_t ⊗ x_t, b's is Σ_t dL/dy_t."""
    x, weight, bias = call.bind("input", "weight", "bias")
    grad = call.output_grad  # (R, *, p)
    factors: Factors = {}
    if call.tracks(x):  # (*, d) · (R, d): an output column for every row of the "weight"
        examples = call.original.bind("input", "weight")[1]
        return {x: Outer(grad.flatten(1).unsqueeze(1), examples.unsqueeze(1), x.shape)}
    if call.tracks(weight):
        factors[weight] = Outer(grad, x) if weight.dim() == 2 else _vector_factor(grad, x)
    if call.tracks(bias):
        factors[bias] = Dense.summed(grad, bias.shape)
    return factors


def _vector_factor(grad: Tensor, x: Tensor) -> Factor:
    """y = ⟨x, w⟩. grad: (R, *), x: (R, *, d)"""
    return Outer(grad.unsqueeze(-1), x, x.shape[-1:])


def _product_reads(use: Use) -> list[Tensor]:
    return [value for value in _operands(use) if not use.tracks(value)]


def _product_row_axes(use: Use, dims: int) -> tuple[int, ...]:
    """x W: every axis of the output but W's own; W x: the columns may be examples too, the axis before them is W's."""
    a, b = _operands(use)
    weight, other = (b, a) if use.tracks(b) else (a, b)
    if weight.dim() > 2:
        check_operands(other)
        return tuple(axis for axis in range(dims) if axis != dims - (1 if weight is b else 2))
    if use.tracks(b):
        return tuple(range(dims - (b.dim() > 1)))
    if a.dim() == 1:
        return tuple(range(dims))
    return tuple(axis for axis in range(dims) if axis != dims - (2 if b.dim() > 1 else 1))


@own_rule(*_PRODUCTS_OF_VECTORS, row_axes=_product_row_axes, reads=_product_reads)
@own_rule(*_PRODUCTS, row_axes=_product_row_axes, reads=_product_reads, is_product=True)
def matmul(call: Call) -> Factors:
    """Products with a weight on either side; the weight's gradient is Σ_t of outer products."""
    a, b = _operands(call)
    grad = call.output_grad
    if (b if call.tracks(b) else a).dim() > 2:
        return _stacked(call)
    if call.tracks(b):  # (R, *, d) · (d, p), or · (d,)
        return {b: Outer(a, grad) if b.dim() == 2 else _vector_factor(grad, a)}
    if a.dim() == 1:  # (d,) · (*, d, n): the output has b's axes without the one before the last
        b = _operands(call.original)[1]
        columns = b.movedim(-2, -1)  # (*, n, d)
        return {a: _vector_factor(grad, to_rows(columns, call.axes))}
    columns_are_rows = b.dim() - (not call.axes) == 1 or len(call.output_shape) - 1 in call.axes
    if columns_are_rows:  # (p, d) · (d,), or (p, d) · (d, R)
        return {a: Outer(grad, b)}
    return {a: Outer(grad.mT, b.mT)}  # (p, d) · (R, *, d, n)


def _stacked(call: Call) -> Factors:
    """A weight of three axes or more: a matrix for each index along the first ones."""
    a, b = _operands(call.original)
    grad = from_rows(call.output_grad.unsqueeze(0), call.axes, call.output_shape)[0]
    if call.tracks(b):
        return {b: stacked_factor(a, grad, b, call.axes, weight_left=False)}
    last, before = grad.dim() - 1, grad.dim() - 2
    axes = tuple(before if axis == last else axis for axis in call.axes)
    return {a: stacked_factor(b.mT, grad.mT, a, axes, weight_left=True)}


def _addmm_row_axes(use: Use, dims: int) -> tuple[int, ...]:
    return (1,) if use.tracks(use.bind("input", "mat1")[1]) else (0,)


@own_rule(torch.addmm, torch.Tensor.addmm, row_axes=_addmm_row_axes, is_product=True, known_by=0)
def addmm(call: Call) -> Factors:
    """y = β·c + α·x W, the Conv1D of GPT-2: W's gradient is α·Σ x ⊗ dL/dy, c's is β·dL/dy added over what c was broadcast to."""
    c, x, weight, beta, alpha = call.bind("input", "mat1", "mat2", "beta", "alpha", beta=1, alpha=1)
    grad = call.output_grad  # (R, p)
    factors: Factors = {}
    if call.tracks(c):
        factors[c] = spread_factor(_scaled(grad, beta), call.axes, call.output_shape, c.shape)
    if call.tracks(weight):
        factors[weight] = Outer(x, _scaled(grad, alpha))
    if call.tracks(x):
        factors[x] = Outer(_scaled(grad, alpha), weight)  # the columns of mat2 are the rows here
    return factors


def _scaled(grad: Tensor, number: float) -> Tensor:
    return grad if number == 1 else number * grad


@own_rule(F.bilinear)
def bilinear(call: Call) -> Factors:
    """y_o = Σ_ij x_i W_oij z_j + b_o: W's gradient is dL/dy ⊗ (x ⊗ z)."""
    x, z, weight, bias = call.bind("input1", "input2", "weight", "bias")
    grad = call.output_grad  # (R, *, o)
    factors: Factors = {}
    if call.tracks(weight):
        pairs = (x.unsqueeze(-1) * z.unsqueeze(-2)).flatten(-2)  # (R, *, i·j)
        factors[weight] = Outer(grad, pairs, weight.shape)
    if call.tracks(bias):
        factors[bias] = Dense.summed(grad, bias.shape)
    return factors


@rewrite(torch.addmv, torch.Tensor.addmv)
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * input + alpha * torch.mv(mat, vec)


@rewrite(torch.baddbmm, torch.Tensor.baddbmm)
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * input + alpha * torch.bmm(batch1, batch2)


@rewrite(torch.inner, torch.Tensor.inner)
def inner(input: Tensor, other: Tensor) -> Any:
    """Σ over the last axis of both; a weight of one or two axes on the right is `linear`."""
    if other.dim() > 2 or input.dim() == 0 or other.dim() == 0:
        return torch.tensordot(input, other, dims=([-1], [-1])) if input.dim() and other.dim() else input * other
    return torch.matmul(input, other.mT if other.dim() == 2 else other)


@rewrite(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> Any:
    """Contracted axes of `a` last, those of `b` first, then one matrix product."""
    if isinstance(dims, int):
        of_a, of_b = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        of_a, of_b = ([dim] if isinstance(dim, int) else list(dim) for dim in dims)
    of_a, of_b = [axis % a.dim() for axis in of_a], [axis % b.dim() for axis in of_b]
    free_a, free_b = ([axis for axis in range(t.dim()) if axis not in taken] for t, taken in ((a, of_a), (b, of_b)))
    left = a.permute(*free_a, *of_a).flatten(len(free_a)) if of_a else a.unsqueeze(-1)
    right = b.permute(*of_b, *free_b)
    right = right.flatten(0, len(of_b) - 1) if of_b else right.unsqueeze(0)
    shape_b = right.shape[1:]
    product = torch.matmul(left, right.flatten(1)) if right.dim() > 1 else torch.matmul(left, right)
    return product.unflatten(-1, shape_b) if len(shape_b) > 1 else product
