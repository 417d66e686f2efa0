"""From a derived weight back to its parameters: transposes, slices, casts, look-ups, and anything autograd can differentiate.

A factor of a derived weight D = f(θ) is pulled back to θ: the gradient of example i is Jᵀ g_i with J = ∂D/∂θ. For views,
casts and look-ups Jᵀ only moves numbers, so the factor keeps its form; everything else goes through autograd, a chunk of
examples at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .factors import Dense, Diagonal, Factor, Outer, Placed, Rows
from .factors.placed import Region, Storage, is_injective, positions
from .functions import trait_of
from .layout import to_rows
from .marks import Derived, Marks
from .numerics import flat_rows
from .rules.embedding import rows_factor
from .tracing import is_tracing


def pull_back(weight: Tensor, factor: Factor, marks: Marks) -> tuple[Tensor, Factor]:
    """Follow views, casts and look-ups up to the parameter, or to the first weight that needs autograd."""
    while id(weight) not in marks.parameters:
        is_view = weight._is_view() and weight._base is not None
        step = _through_view(weight, factor) if is_view else _through_recipe(weight, factor, marks.derived(weight))
        if step is None:
            break
        weight, factor = step
    return weight, factor


def needs_autograd(weight: Tensor, marks: Marks) -> bool:
    """Whether `pull_back` may stop short of the parameters, so that the graph must outlive the backward pass."""
    return id(weight) not in marks.parameters and any(source is None for source, _, _ in _way_back(weight, marks))


def path_of(weight: Tensor, marks: Marks) -> tuple[tuple[Any, ...], list[Tensor]]:
    """What `pull_back` goes by on its way from a weight that needs no autograd, and the numbers of rows it reads there."""
    places, numbers = [], []
    for source, ids, how in _way_back(weight, marks):
        assert source is not None, "needs_autograd was asked before"
        places.append((how, weight.shape, weight.stride(), weight.storage_offset(), weight.dtype))
        if ids is not None:
            numbers.append(ids)
        weight = source
    return (*places, marks.labels[id(weight)], weight.shape, weight.stride(), weight.storage_offset(), weight.dtype), numbers


def _way_back(weight: Tensor, marks: Marks) -> Iterator[tuple[Tensor | None, Tensor | None, Any]]:
    """Step by step to the parameter: (what the weight was made of, the rows that were looked up in it, how); (None, None, None) at a dead end."""
    seen_view = False
    while id(weight) not in marks.parameters:
        derived = marks.derived(weight)
        source: Tensor | None = None
        ids: Tensor | None = None
        how: Any = None
        if weight._is_view() and weight._base is not None:
            source, how, seen_view = weight._base, "view", True
        elif derived is not None and derived.func is not None:
            if trait_of(derived.func).copies and not seen_view:
                source, how = _copied(derived), derived.func
            if source is None and (found := _table_and_ids(derived)) is not None:
                source, ids, padding = found
                how = derived.func, padding
        yield source, ids, how
        if source is None:
            return
        weight = source


_stand_ins: ContextVar[Mapping[int, Tensor]] = ContextVar("clipwise_stand_ins", default=MappingProxyType({}))


@contextlib.contextmanager
def standing_in(tensors: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside this block these tensors are read in place of numbers of rows, by their ids."""
    token = _stand_ins.set(tensors)
    try:
        yield
    finally:
        _stand_ins.reset(token)


def _through_view(view: Tensor, factor: Factor) -> tuple[Tensor, Factor] | None:
    """The factor of a view as a factor of the tensor it looks at."""
    base = view._base
    assert base is not None
    region, whole = Region.of(view, base), Storage.of(base)
    if region == Region(whole.shape, whole.stride, 0):
        return base, factor
    if isinstance(factor, Outer) and view.dim() == 2 == base.dim() and region == Region(whole.shape[::-1], whole.stride[::-1], 0):
        return base, factor.transposed()
    same_order = view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous()
    if same_order and _may_reshape(factor, base.shape):
        return base, factor.reshaped(base.shape)
    if isinstance(factor, Diagonal):
        return base, _scattered_diagonal(factor, region, whole)
    if is_injective(region, whole):
        return base, Placed(factor, region, whole)
    return base, _scattered(factor.dense(), positions(region, whole, factor.device), whole)


def _may_reshape(factor: Factor, shape: torch.Size) -> bool:
    return isinstance(factor, Dense | Outer) or (isinstance(factor, Rows) and factor.shape[:1] == shape[:1])


def _scattered(dense: Tensor, index: Tensor, whole: Storage) -> Dense:
    """Add up the entries of an expanded view that show the same element. dense: (B, *view)"""
    flat = flat_rows(dense)
    out = flat.new_zeros(flat.shape[0], torch.Size(whole.shape).numel())
    return Dense(out.index_add_(1, index, flat).view(-1, *whole.shape))


def _scattered_diagonal(factor: Diagonal, region: Region, whole: Storage) -> Dense:
    """The same where each row of the view belongs to one example."""
    index = flat_rows(to_rows(positions(region, whole, factor.device).view(region.shape), factor.axes))  # (R, m)
    owners, rows = factor.owners, flat_rows(factor.rows)
    owned = slice(None) if is_tracing() else owners >= 0  # what is traced has a layout, and every row an owner
    numel = torch.Size(whole.shape).numel()
    places = index[owned] + owners[owned, None] * numel
    out = rows.new_zeros(factor.batch * numel).index_add_(0, places.flatten(), rows[owned].flatten())
    return Dense(out.view(factor.batch, *whole.shape))


def _through_recipe(weight: Tensor, factor: Factor, derived: Derived | None) -> tuple[Tensor, Factor] | None:
    """Casts, copies and look-ups of rows; None where autograd has to do it."""
    if derived is None or derived.func is None:
        return None
    trait = trait_of(derived.func)
    source = _copied(derived)
    if trait.copies and source is not None and source.shape == weight.shape:
        movable = not isinstance(factor, Placed) or (source.stride() == weight.stride() and not source._is_view())
        return (source, factor) if movable else None
    return _through_lookup(weight, factor, derived)


def _copied(derived: Derived) -> Tensor | None:
    """The tensor that a cast or copy was made of."""
    first = derived.args[0] if derived.args else next(iter(derived.kwargs.values()), None)
    return first if isinstance(first, Tensor) else None


def _through_lookup(weight: Tensor, factor: Factor, derived: Derived) -> tuple[Tensor, Factor] | None:
    """D = table[ids]: the gradient of D is rows of the gradient of the table."""
    found = _table_and_ids(derived)
    if found is None:
        return None
    table, ids, padding = found
    ids = _stand_ins.get().get(id(ids), ids)
    if weight.shape != (*ids.shape, *table.shape[1:]):
        return None
    if derived.func is torch.Tensor.__getitem__:
        ids = ids % table.shape[0]  # it counts from the end too
    if isinstance(factor, Dense):
        each = ids.unsqueeze(0).expand(factor.batch, *ids.shape)
        return table, rows_factor(each, factor.grad, table.shape, padding)
    if isinstance(factor, Diagonal) and factor.speaks_of_all and all(axis < ids.dim() for axis in factor.axes):
        each_row = rows_factor(to_rows(ids, factor.axes), factor.rows, table.shape, padding)
        return table, each_row if factor.grouping is None else each_row.merge(factor.grouping)
    return None


def _table_and_ids(derived: Derived) -> tuple[Tensor, Tensor, int] | None:
    func, args, kwargs = derived.func, derived.args, derived.kwargs
    if func is None or not trait_of(func).looks_up:
        return None
    if func is torch.nn.functional.embedding:
        given = dict(zip(("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"), args), **kwargs)
        if given.get("scale_grad_by_freq"):
            return None
        padding = given.get("padding_idx")
        return given["weight"], given["input"], -1 if padding is None else padding % given["weight"].shape[0]
    if func is torch.embedding and len(args) == 2 and not kwargs:
        return args[0], args[1], -1
    if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype in (torch.int64, torch.int32):
        return args[0], args[1], -1
    if func in (torch.index_select, torch.Tensor.index_select) and len(args) == 3 and args[1] == 0:
        return args[0], args[2], -1
    return None


def example_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], watching: Callable[[], AbstractContextManager[None]]
) -> list[Tensor]:
    """Jᵀ c_i for several cotangents c_i. cotangents: (n, *output) each; returns (n, *input) each, zeros where unconnected.

    One batched call where every operation can be batched, else a loop. `watching` turns the tape on: a checkpointed
    region is computed again and must meet the same taps.
    """
    count = cotangents[0].shape[0]
    cast = [c.to(output.dtype) for c, output in zip(cotangents, outputs)]

    def pull(pieces: list[Tensor], batched: bool) -> list[Any]:
        with watching():
            return list(torch.autograd.grad(outputs, inputs, pieces, retain_graph=True, allow_unused=True, is_grads_batched=batched))

    try:
        found = pull(cast, batched=True)
    except RuntimeError:
        each = [pull([c[i] for c in cast], batched=False) for i in range(count)]
        found = [None if column[0] is None else torch.stack(column) for column in zip(*each)]
    return [torch.zeros(count, *inp.shape, dtype=inp.dtype, device=inp.device) if g is None else g for g, inp in zip(found, inputs)]
