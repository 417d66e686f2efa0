"""Gradients of a tensor that holds one part for each example: a table looked up for every row, a token expanded over the batch."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..layout import from_rows, to_rows
from ..numerics import scale_rows, squared_norms, to_accumulate
from .base import Factor, Grouping


class Diagonal(Factor):
    """g_i is `grad` in the rows that belong to example i, and zero elsewhere. grad: shape `shape`, its rows lying along `axes`.

    It appears where a weight was made from constants as large as the batch; `derived.py` pulls it back to the weight.
    `grouping` says which example each row belongs to (none: row i to example i), `span` of which examples this factor speaks.
    """

    def __init__(self, grad: Tensor, axes: tuple[int, ...], grouping: Grouping | None = None, span: range | None = None):
        self.grad = to_accumulate(grad)
        self.axes = axes
        self.shape = grad.shape
        self.rows = to_rows(self.grad, axes)  # (R, ...)
        self.grouping = grouping
        self.span = range(len(self.rows) if grouping is None else grouping.batch) if span is None else span
        self.batch = len(self.span)

    @property
    def speaks_of_all(self) -> bool:
        return self.batch == (len(self.rows) if self.grouping is None else self.grouping.batch)

    @cached_property
    def owners(self) -> Tensor:
        """(R,): the example of each row, -1 for nobody."""
        if self.grouping is None:
            return torch.arange(len(self.rows), device=self.grad.device)
        return self.grouping.owners().to(self.grad.device)

    def dense(self) -> Tensor:
        return from_rows(self.rows.masked_fill(~self._mine(self.rows.dim()), 0), self.axes, self.shape)

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        mine = self._mine(2)[..., 0]  # (B, R); a row that is nobody's enters no norm and may hold anything: it is dropped always
        row_weights = torch.where(mine, weights[:, None], 0).sum(0)
        return from_rows(scale_rows(self.rows, row_weights).unsqueeze(0), self.axes, self.shape)[0]

    def mass(self) -> Tensor:
        return torch.where(self._mine(2)[..., 0], squared_norms(self.rows), 0).sum(1).sqrt()

    def _mine(self, dims: int) -> Tensor:
        """(B, R, 1 …): whether row r belongs to example i, shaped to go with rows of `dims` axes."""
        examples = torch.arange(self.span.start, self.span.stop, device=self.device)
        mine = examples[:, None] == self.owners
        return mine.view(*mine.shape, *[1] * (dims - 1))

    def merge(self, grouping: Grouping) -> Diagonal:
        return Diagonal(self.grad, self.axes, grouping)

    def examples(self, start: int, stop: int) -> Diagonal:
        return Diagonal(self.grad, self.axes, self.grouping, self.span[start:stop])

    def reshaped(self, shape: torch.Size) -> Factor:
        raise ValueError("a Diagonal keeps the shape it was measured in")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grad,)
