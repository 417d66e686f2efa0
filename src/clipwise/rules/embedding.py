"""Look-ups in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UncoveredUse
from ..factors import Rows
from ..registry import Call, Factors, Use, inside, own_rule, rewrite

if TYPE_CHECKING:
    from ..watch import Watch


def _refuse_options(function: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Options under which one example's gradient depends on another."""
    if max_norm is not None:
        raise UncoveredUse(
            f"{function}(max_norm=…) rescales the rows that this batch looks up, in place: the batch changes the model before any noise.",
            "Leave max_norm out, or renormalise the whole table after each optimizer step.",
        )
    if scale_grad_by_freq:
        raise UncoveredUse(
            f"{function}(scale_grad_by_freq=True) divides a gradient by how often the whole batch looks that row up.",
            "Leave scale_grad_by_freq out; no example has such a gradient of its own.",
        )


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
    _refuse_options("F.embedding", max_norm, scale_grad_by_freq)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return torch.embedding(weight, input, padding)


@inside(F.embedding_bag)
def embedding_bag(watch: Watch, use: Use) -> Tensor:
    """Look-ups, then a sum, mean or maximum over each bag. Bags are rows of ids, or pieces of one long vector."""
    ids, weight, offsets, max_norm, _, by_frequency, mode, _, scales, last, padding_idx = use.bind(
        *_BAG, max_norm=None, scale_grad_by_freq=False, mode="mean", include_last_offset=False
    )
    _refuse_options("F.embedding_bag", max_norm, by_frequency)
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    rows = F.embedding(ids, weight, padding)  # (B, L, d) or (N, d)
    kept = torch.ones_like(ids, dtype=rows.dtype) if padding is None else (ids != padding).to(rows.dtype)
    if scales is not None:
        rows = rows * scales.unsqueeze(-1)
    if ids.dim() == 2:
        return _over_axis(rows, kept, mode)
    watch.tape.fixed[id(offsets)] = offsets
    return _over_pieces(rows, kept, offsets[:-1] if last else offsets, mode)


_BAG = (
    "input",
    "weight",
    "offsets",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)


def _over_axis(rows: Tensor, kept: Tensor, mode: str) -> Tensor:
    """rows: (B, L, d), kept: (B, L), 0 for padding"""
    if mode == "max":
        found = torch.where(kept.unsqueeze(-1) > 0, rows, float("-inf")).max(1).values
        return torch.where(kept.sum(1, keepdim=True) > 0, found, 0.0)
    total = (rows * kept.unsqueeze(-1)).sum(1)
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)


def _over_pieces(rows: Tensor, kept: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """rows: (N, d), kept: (N,), offsets: (B,), where each bag begins"""
    place = torch.arange(len(rows), device=rows.device)
    bag = torch.searchsorted(offsets.to(place.dtype), place, right=True) - 1
    empty = rows.new_zeros(len(offsets), rows.shape[1])
    counts = rows.new_zeros(len(offsets)).index_add(0, bag, kept).unsqueeze(1)
    if mode == "max":
        filled = torch.where(kept.unsqueeze(-1) > 0, rows, float("-inf"))
        found = empty.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), filled, "amax", include_self=False)
        return torch.where(counts > 0, found, 0.0)
    total = empty.index_add(0, bag, rows * kept.unsqueeze(-1))
    return total if mode == "sum" else total / counts.clamp(min=1)


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
    return _look_up(input.movedim(dim, 0), index, to=dim % input.dim())


@rewrite(torch.Tensor.__getitem__)
def getitem(table: Tensor, index: object) -> object:
    """weight[ids], weight[:, ids], weight[rows, columns] with integer tensors from the examples: a look-up of whole rows."""
    items = index if isinstance(index, tuple) else (index,)
    if any(item is Ellipsis or item is None for item in items):
        return NotImplemented
    chosen = [axis for axis, item in enumerate(items) if not (isinstance(item, slice) and item == slice(None))]
    picks = [items[axis] for axis in chosen]
    if not chosen or chosen != list(range(chosen[0], chosen[0] + len(chosen))) or not all(map(_is_integer_index, picks)):
        return NotImplemented
    if all(isinstance(pick, int) or not pick.dim() for pick in picks):
        return table[tuple(int(item) if isinstance(item, Tensor) else item for item in items)]  # one part for all: a derived weight
    sizes = [table.shape[axis] for axis in chosen]
    flat: Any = 0
    for pick, size in zip(picks, sizes):
        flat = flat * size + pick % size
    rows = table.movedim(chosen, list(range(len(chosen)))).flatten(0, len(chosen) - 1)
    return _look_up(rows, flat, to=chosen[0])


def _is_integer_index(item: object) -> bool:
    return isinstance(item, int) or (isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32))


def _look_up(rows: Tensor, ids: Tensor, to: int = 0) -> Tensor:
    """rows[ids] through torch.embedding, whatever stands behind the first axis; the axes of ids end up at `to`."""
    rest = rows.shape[1:]
    found = torch.embedding(rows.flatten(1) if rest else rows.unsqueeze(1), ids)
    found = found.unflatten(-1, rest) if rest else found.squeeze(-1)
    return found.movedim(list(range(ids.dim())), list(range(to, to + ids.dim()))) if to else found


@rewrite(torch.gather, torch.Tensor.gather)
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> object:
    """Entries of a weight picked one by one: a look-up in the list of its entries."""
    if input.dim() != index.dim() or not input.dim():
        return NotImplemented
    flat: Any = 0
    for axis, size in enumerate(input.shape):
        along = torch.arange(index.shape[axis], device=index.device).view(-1, *[1] * (input.dim() - 1 - axis))
        flat = flat * size + (index if axis == dim % input.dim() else along)
    return _look_up(input.flatten(), flat)
