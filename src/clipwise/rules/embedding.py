"""Look-ups in a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UncoveredUse
from ..factors import Rows
from ..registry import Call, Factors, own_rule, rewrite


@rewrite(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Refuses the options under which one example's gradient depends on another, and never makes sparse gradients: noise is dense."""
    if max_norm is not None:
        raise UncoveredUse(
            "F.embedding(max_norm=…) rescales the rows that this batch looks up, in place: the batch changes the model before any noise.",
            "Leave max_norm out, or renormalise the whole table after each optimizer step.",
        )
    if scale_grad_by_freq:
        raise UncoveredUse(
            "F.embedding(scale_grad_by_freq=True) divides a gradient by how often the whole batch looks that row up.",
            "Leave scale_grad_by_freq out; no example has such a gradient of its own.",
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return torch.embedding(weight, input, padding)


@own_rule(torch.embedding)
def lookup(call: Call) -> Factors:
    """W's gradient has dL/dy_t added to row id_t; the padding row gets none."""
    weight, ids, padding, by_frequency, _ = call.bind("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse", padding_idx=-1)
    if by_frequency:
        raise UncoveredUse("torch.embedding(scale_grad_by_freq=True) has no gradient per example.", "Leave scale_grad_by_freq out.")
    return {weight: rows_factor(ids, call.output_grad, weight.shape, padding)}


def rows_factor(ids: Tensor, grad: Tensor, shape: torch.Size, padding: int = -1) -> Rows:
    """ids: (R, *), grad: (R, *, *shape[1:])"""
    if padding >= 0:
        grad = grad.masked_fill((ids == padding).view(*ids.shape, *[1] * (len(shape) - 1)), 0)
    return Rows(ids, grad, shape)


@rewrite(torch.index_select, torch.Tensor.index_select)
def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows of a weight picked by the examples."""
    return torch.embedding(input.movedim(dim, 0).flatten(1), index).unflatten(-1, input.movedim(dim, 0).shape[1:]).movedim(0, dim)


@rewrite(torch.Tensor.__getitem__)
def getitem(table: Tensor, index: object) -> object:
    """weight[ids] with ids from the examples: a look-up of whole rows."""
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and table.dim() > 1:
        rows = table.shape[1:]
        return torch.embedding(table.flatten(1), index % table.shape[0]).unflatten(-1, rows)
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and table.dim() == 1:
        return torch.embedding(table.unsqueeze(1), index % table.shape[0]).squeeze(-1)
    return NotImplemented
