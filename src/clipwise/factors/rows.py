"""Gradients of embedding tables: a few rows of a tall matrix."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..numerics import is_worth_a_kernel, row_norms, scale_rows, squared_norms, to_accumulate
from ..trials import roughly
from .base import Factor, Grouping


class Rows(Factor):
    """g_i has rows[i, t] added to its row ids[i, t], for every t. ids: (B, *), rows: (B, *, *shape[1:])

    The squared norm adds the rows that share an id before squaring: sorted ids, one scatter or one kernel, O(T·d) and no T² gram.
    """

    def __init__(self, ids: Tensor, rows: Tensor, shape: torch.Size):
        self.ids = ids.reshape(ids.shape[0], -1)  # (B, T)
        self.rows = to_accumulate(rows).reshape(*self.ids.shape, -1)  # (B, T, d)
        self.shape = torch.Size(shape)
        self.batch = ids.shape[0]

    def dense(self) -> Tensor:
        height = self.shape[0]
        keys = self.ids + torch.arange(self.batch, device=self.device)[:, None] * height  # (B, T)
        table = self.rows.new_zeros(self.batch * height, self.rows.shape[2])
        return table.index_add_(0, keys.flatten(), self.rows.flatten(0, 1)).view(self.batch, *self.shape)

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        table = self.rows.new_zeros(self.shape[0], self.rows.shape[2])
        return table.index_add_(0, self.ids.flatten(), scale_rows(self.rows, weights, clean=clean).flatten(0, 1)).view(self.shape)

    def squared_norms(self) -> Tensor:
        """(B,) in float64."""
        ids, order = self.ids.sort(1)
        if is_worth_a_kernel(self.rows):
            from ..kernels.segments import segment_squares

            return segment_squares(ids, order, self.rows)
        new = torch.ones_like(ids)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        segment = (new.cumsum(1) - 1)[..., None].expand_as(self.rows)  # (B, T, d)
        ordered = self.rows.gather(1, order[..., None].expand_as(self.rows))
        return squared_norms(torch.zeros_like(self.rows).scatter_add_(1, segment, ordered))

    def mass(self) -> Tensor:
        return row_norms(self.rows.flatten(0, 1)).view(self.ids.shape).sum(1)

    def merge(self, grouping: Grouping) -> Rows:
        return Rows(grouping(self.ids), grouping(self.rows), self.shape)

    def examples(self, start: int, stop: int) -> Rows:
        return Rows(self.ids[start:stop], self.rows[start:stop], self.shape)

    def reshaped(self, shape: torch.Size) -> Factor:
        if shape[:1] != self.shape[:1]:
            raise ValueError(f"rows of a {tuple(self.shape)} table are not rows of a {tuple(shape)} one")
        return Rows(self.ids, self.rows, shape)

    def joined(self, other: Rows) -> Rows:
        """The gradient of a table used twice."""
        return Rows(torch.cat([self.ids, other.ids], 1), torch.cat([self.rows, other.rows], 1), self.shape)

    @property
    def signature(self) -> Hashable:
        return type(self), self.shape, roughly(self.ids.shape[1], bits=2)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,)
