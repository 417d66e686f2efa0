"""Products with a stack of matrices: a weight for each head, expert or time step, or one expanded over the examples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UncoveredUse
from ..factors import Diagonal, Factor, Outer
from ..layout import to_rows
from ..numerics import to_accumulate


def check_operands(other: Tensor) -> None:
    """A vector has no axis along which it could be read as examples."""
    if other.dim() < 2:
        raise UncoveredUse(
            "a stack of weights is multiplied with a single vector.", "Give the vector a second axis: x.unsqueeze(-1) or x.unsqueeze(-2)."
        )


def stacked_factor(x: Tensor, grad: Tensor, weight: Tensor, axes: tuple[int, ...], *, weight_left: bool) -> Factor:
    """y = x W for each matrix of the stack, the stack's axes broadcast. Of matrix s the gradient is Σ_t x_st ⊗ dL/dy_st.

    x: (*, t, d), grad: (*, t, p) as autograd hands it over, weight: (*, d, p); axes: those of grad that number rows. With
    `weight_left` y = W x was transposed into that form, and the weight is (*, p, d).
    """
    stack = grad.shape[:-2]
    x = x.expand(*stack, *x.shape[-2:])
    missing = len(stack) + 2 - weight.dim()
    shared = [axis for axis in range(len(stack)) if axis >= missing and weight.shape[axis - missing] != 1]
    own = [axis for axis in axes if axis in shared]  # every row has matrices of its own along these axes
    left, right = (grad, x) if weight_left else (x, grad)
    if own and len(own) == len(axes):
        summed = [axis for axis in range(len(stack)) if axis not in shared]
        whole = to_accumulate(left).mT @ to_accumulate(right)
        added = whole.sum(summed, keepdim=True) if summed else whole
        return Diagonal(added.reshape(weight.shape), tuple(axis - missing for axis in axes))
    left, right = (_blocks(side, axes, [axis for axis in shared if axis not in own]) for side in (left, right))
    if own:
        left, right = (_only_own_blocks(side, axes, own, shared, grad.shape) for side in (left, right))
    return Outer(left, right, weight.shape, groups=True)


def _blocks(tensor: Tensor, axes: tuple[int, ...], stack: list[int]) -> Tensor:
    """(R, G, T, width): rows, matrices of the stack, and what is added over."""
    rows_first = to_rows(tensor, axes)
    rest = [axis for axis in range(tensor.dim() - 1) if axis not in axes]
    inner = rows_first.movedim([1 + rest.index(axis) for axis in stack], list(range(1, 1 + len(stack)))) if stack else rows_first
    blocks = inner.flatten(1, len(stack)) if stack else inner.unsqueeze(1)
    return blocks.flatten(2, -2) if blocks.dim() > 3 else blocks.unsqueeze(2) if blocks.dim() == 3 else blocks


def _only_own_blocks(blocks: Tensor, axes: tuple[int, ...], own: list[int], shared: list[int], shape: torch.Size) -> Tensor:
    """Rows that hold examples *and* choose their matrix (slots of an expert): zeros for the matrices they do not meet.

    blocks: (R, G', T, width), G' the matrices along axes that number no rows → (R, G, T, width).
    """
    sizes = [shape[axis] for axis in axes]
    index = torch.arange(blocks.shape[0], device=blocks.device)
    chosen = torch.zeros_like(index)
    for place, axis in enumerate(axes):
        position = index // torch.Size(sizes[place + 1 :]).numel() % sizes[place]
        if axis in own:
            chosen = chosen * shape[axis] + position
    count = torch.Size([shape[axis] for axis in own]).numel()
    mine = torch.nn.functional.one_hot(chosen, count).bool()  # (R, own matrices)
    spread = torch.where(mine[:, :, None, None, None], blocks.unsqueeze(1), 0)  # (R, own, G', T, width)
    order = [*own, *(axis for axis in shared if axis not in own)]
    spread = spread.unflatten(1, [shape[axis] for axis in own])
    others = [shape[axis] for axis in shared if axis not in own]
    spread = spread.unflatten(1 + len(own), others) if others else spread.squeeze(1 + len(own))
    spread = spread.movedim([1 + order.index(axis) for axis in shared], list(range(1, 1 + len(shared))))
    return spread.flatten(1, len(shared))
