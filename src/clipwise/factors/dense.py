"""Gradients that are written out: biases, normalisation scales, class tokens, whatever is small."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ..numerics import accumulation_dtype, flat_rows, in_working_precision, row_norms, to_accumulate, weighted_row_sum
from .base import Factor, Grouping
from .squares import Squares, of_rows


class Dense(Factor):
    """g_i = grad[i].

    `Dense.summed(terms)` adds up the terms of each row and remembers how large they were: a sum that cancels is small,
    but its rounding error is as large as its terms.
    """

    def __init__(self, grad: Tensor, *, mass: Callable[[], Tensor] | None = None):
        self._given = grad
        self.shape = grad.shape[1:]
        self.batch = grad.shape[0]
        self._mass = mass

    @classmethod
    def summed(cls, terms: Tensor, shape: torch.Size | tuple[int, ...], *, parts: Callable[[], Tensor] | None = None) -> Dense:
        """Σ over all axes of `terms` but the first and the last len(shape). terms: (B, *, *shape)

        `parts` makes |a| + |b| where autograd rounds terms a − b as it rounds a and b.
        """
        if parts is not None:
            return cls(cls.summed(terms, shape)._given, mass=lambda: cls.summed(parts(), shape).mass())
        if terms.shape[1:] == shape:
            return cls(terms)
        terms = terms.reshape(terms.shape[0], -1, *shape)  # (B, T, *shape)
        if terms.shape[1] == 1:
            return cls(terms[:, 0])
        total = terms.sum(1, dtype=accumulation_dtype(terms.dtype))
        return cls(total, mass=lambda: row_norms(to_accumulate(terms).abs().sum(1)))

    @cached_property
    def grad(self) -> Tensor:
        """(B, *shape), in working precision"""
        wide = self._given = to_accumulate(self._given)
        return wide

    def dense(self) -> Tensor:
        return self.grad

    @property
    def is_whole(self) -> bool:
        """Whether the gradients lie in one piece of memory."""
        return True

    def squares(self) -> Squares:
        return of_rows(self.grad)

    def part(self, start: int, stop: int) -> Tensor:
        """The gradients of some examples."""
        return self.grad[start:stop]

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        exact = in_working_precision(weights, self.grad.dtype)
        return weighted_row_sum(flat_rows(self.grad), exact, clean=clean).view(self.shape)

    def mass(self) -> Tensor:
        return self._mass() if self._mass is not None else row_norms(self.grad)

    @property
    def is_one_term(self) -> bool:
        """Whether nothing was added up on the way here."""
        return self._mass is None

    def merge(self, grouping: Grouping) -> Dense:
        grouped = grouping(self._given)  # (B, k, *shape)
        if grouped.shape[1] == 1:
            mass = self._mass
            return Dense(grouped[:, 0], mass=None if mass is None else lambda: grouping(mass())[:, 0])
        merged = Dense.summed(grouped, self.shape)
        merged._mass = lambda: grouping(self.mass()).sum(1)
        return merged

    def examples(self, start: int, stop: int) -> Dense:
        return Dense(self.part(start, stop))

    def reshaped(self, shape: torch.Size) -> Dense:
        return Dense(self.grad.reshape(self.batch, *shape), mass=self._mass)

    def plus(self, other: Factor) -> Dense:
        """The gradient of a tensor used twice."""
        return Dense(self.grad + other.dense(), mass=lambda: self.mass() + other.mass())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grad,)
