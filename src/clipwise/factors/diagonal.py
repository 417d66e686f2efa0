"""Gradients of a tensor that holds one part for each example: a table looked up for every row, a token expanded over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import from_rows, to_rows
from ..numerics import scale_rows, squared_norms, to_accumulate
from .base import Factor, Grouping


class Diagonal(Factor):
    """g_i is `grad` in the rows that belong to example i, and zero elsewhere. grad: shape `shape`, its rows lying along `axes`.

    It appears where a weight was made from constants as large as the batch; `derived.py` pulls it back to the weight.
    `owners` gives the example of each row (-1: nobody), `span` the examples this factor speaks of.
    """

    def __init__(self, grad: Tensor, axes: tuple[int, ...], owners: Tensor | None = None, span: range | None = None):
        self.grad = to_accumulate(grad)
        self.axes = axes
        self.shape = grad.shape
        self.rows = to_rows(self.grad, axes)  # (R, ...)
        self.owners = torch.arange(len(self.rows), device=grad.device) if owners is None else owners.to(grad.device)
        self.span = range(len(self.rows)) if span is None else span
        self.batch = len(self.span)

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
        return Diagonal(self.grad, self.axes, grouping.owners(), range(grouping.batch))

    def examples(self, start: int, stop: int) -> Diagonal:
        return Diagonal(self.grad, self.axes, self.owners, self.span[start:stop])

    def reshaped(self, shape: torch.Size) -> Factor:
        raise ValueError("a Diagonal keeps the shape it was measured in")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grad,)
