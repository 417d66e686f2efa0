"""Gradients of matrices: Σ_t left_t ⊗ right_t for each example (paper, Sections 5.1 and 5.5)."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import torch
from torch import Tensor

from ..numerics import (
    drop_rows,
    in_working_precision,
    is_worth_a_kernel,
    product,
    rounds_to_tf32,
    row_norms,
    scale_stored,
    to_multiply,
)
from ..tracing import is_tracing
from ..trials import roughly
from .base import Factor, Grouping
from .squares import Squares, known

_AT_A_TIME = 2**27  # bytes of a side that are weighed at a time in a graph, which keeps the memory that it works in …
_ALIGNED = 64  # … so many columns, or a multiple


class Outer(Factor):
    """g_i = Σ_t left[i, t] ⊗ right[i, t], the gradient of a matrix: of a linear layer, left is the output gradient and right the input.

    left: (B, *, p) and right: (B, *, d), with the same axes *; they are added over. `shape` is the shape of the parameter if
    it is not (p, d). With `groups=True` axis 1 numbers independent blocks: left (B, G, *, p), right (B, G, *, d), and the
    gradient is the G blocks (G, p, d), as in grouped convolutions.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size | None = None, *, groups: bool = False):
        if left.shape[:-1] != right.shape[:-1] or left.dim() < 2 + groups:
            raise ValueError(
                f"Outer needs two tensors that agree in all axes but the last, got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        self.batch, self.blocks = left.shape[0], left.shape[1] if groups else 1
        self.terms = left.shape[1 + groups : -1].numel()
        left, right = to_multiply(left, right)
        self._sides = left, right
        default = (left.shape[-1], right.shape[-1])
        self.shape = torch.Size(shape if shape is not None else ((self.blocks, *default) if groups else default))

    @cached_property
    def left(self) -> Tensor:
        """(B, G, T, p)"""
        side = self._sides[0].reshape(self.batch, self.blocks, self.terms, self._sides[0].shape[-1])
        self._sides = (side, self._sides[1])  # a copy takes its place
        return side

    @cached_property
    def right(self) -> Tensor:
        """(B, G, T, d)"""
        side = self._sides[1].reshape(self.batch, self.blocks, self.terms, self._sides[1].shape[-1])
        self._sides = (self._sides[0], side)  # a copy takes its place
        return side

    def dense(self) -> Tensor:
        return product(self.left.mT, self.right).reshape(self.batch, *self.shape)

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        exact = in_working_precision(weights, self.dtype)
        left, right = self._sides if self.blocks == 1 else (self.left, self.right)
        if self.blocks == 1 and is_tracing() and max(left.nbytes, right.nbytes) > _AT_A_TIME:
            return _in_parts(left.flatten(0, -2), right.flatten(0, -2), exact.repeat_interleave(self.terms)).view(self.shape)
        left, right = scale_stored(left, exact, clean=clean), right if clean else drop_rows(right, exact)
        if self.blocks == 1:
            total = product(left.flatten(0, -2).t(), right.flatten(0, -2))
            return total if total.shape == self.shape else total.view(self.shape)
        left, right = (side.transpose(0, 1).flatten(1, 2) for side in (left, right))  # (G, B·T, ·)
        return product(left.mT, right).view(self.shape)

    def term_norms(self) -> Tensor:
        """(B, G, T): ‖left_t‖·‖right_t‖, in float64."""
        left, right = (row_norms(side.flatten(0, 2)) for side in (self.left, self.right))
        return (left * right).view(self.left.shape[:3])

    def single_term_squares(self) -> Squares:
        """‖left‖²·‖right‖², where no example has more than one term in a block."""
        if (self.blocks, self.terms) == (1, 1):
            return Squares(row_norms(self._sides[0]) * row_norms(self._sides[1]))
        return known(self.term_norms().square().flatten(1).sum(1))

    def by_kernel(self, tile: int, keep: bool = False) -> tuple[Tensor, None]:
        """Squared norms, (B,) in float64. Nothing is written out, so nothing is kept."""
        from ..kernels.outer import outer_squares

        return outer_squares(self.left, self.right, tile, rounds_to_tf32(by_cudnn=False)), None

    def by_gram_kernel(self, tile: int) -> tuple[Tensor, Tensor]:
        """Squared norms and mass, (B,) each in float64."""
        from ..kernels.gram import gram_squares

        squares, mass = gram_squares(self.left[:, 0], self.right[:, 0], tile)
        return squares, mass

    def mass(self) -> Tensor:
        if is_worth_a_kernel(self._sides[0]):
            from ..kernels.terms import masses

            norms = masses(self.left.flatten(0, 1), self.right.flatten(0, 1)).view(self.batch, self.blocks)
        else:
            norms = self.term_norms().sum(2)  # (B, G)
        return norms[:, 0] if self.blocks == 1 else torch.linalg.vector_norm(norms, dim=1)

    def merge(self, grouping: Grouping) -> Outer:
        left, right = grouping(self.left), grouping(self.right)  # (B, k, G, T, ·)
        return Outer(left.transpose(1, 2), right.transpose(1, 2), self.shape, groups=True)

    def examples(self, start: int, stop: int) -> Outer:
        return Outer(self.left[start:stop], self.right[start:stop], self.shape, groups=True)

    def reshaped(self, shape: torch.Size) -> Outer:
        return Outer(self.left, self.right, shape, groups=True)

    def transposed(self) -> Outer:
        """The factor of the transposed matrix."""
        p, d = self.shape
        return Outer(self.right, self.left, torch.Size((d, p)), groups=True)

    def same_blocks(self, other: Outer) -> bool:
        """Whether the two have the same shape, block by block, so that `joined` may put one behind the other."""
        return self.shape == other.shape and self._block == other._block

    def joined(self, other: Outer) -> Outer:
        """The gradient of a matrix used twice: more terms of the same kind, so nothing cancels that would not in truth."""
        mine, others, right, other_right = to_multiply(self.left, other.left, self.right, other.right)
        left, right = torch.cat([mine, others], 2), torch.cat([right, other_right], 2)
        return Outer(left, right, self.shape, groups=True)

    @property
    def _block(self) -> tuple[int, int, int]:
        return self.blocks, *self.widths_of_sides

    @property
    def widths_of_sides(self) -> tuple[int, int]:
        """p and d"""
        return self._sides[0].shape[-1], self._sides[1].shape[-1]

    @property
    def widths(self) -> int:
        """p + d, the lengths of the two vectors whose products a gram needs."""
        return sum(self.widths_of_sides)

    @property
    def summary(self) -> str:
        blocks = f"{self.blocks} blocks of " if self.blocks > 1 else ""
        return f"{blocks}{self.terms} × ({' ⊗ '.join(map(str, self.widths_of_sides))})"

    @property
    def signature(self) -> Hashable:
        return type(self), self.shape, self._block, roughly(self.terms, bits=2)

    @property
    def dense_flops(self) -> int:
        return 2 * self.terms * self.numel

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._sides


def _in_parts(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Σ_n weights[n]·left[n] ⊗ right[n], (p, d), the wider side a few columns at a time. left: (N, p), right: (N, d)"""
    if left.shape[1] >= right.shape[1]:
        there = drop_rows(right, weights)
        return torch.cat([product(scale_stored(part, weights).t(), there) for part in _columns(left)])
    there = scale_stored(left, weights).t()
    return torch.cat([product(there, drop_rows(part, weights)) for part in _columns(right)], 1)


def _columns(side: Tensor) -> tuple[Tensor, ...]:
    many = _AT_A_TIME // (len(side) * side.element_size())
    return side.split(max(many - many % _ALIGNED, _ALIGNED), 1)
