"""Functions that work entry by entry or only move entries: a weight in them is tapped on its own side (spread.py)."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Use, rewrite, spread
from ..structure import tensors_in

_NAMES = """add sub subtract rsub mul multiply div divide true_divide floor_divide pow float_power where lerp maximum minimum
    max min fmax fmin atan2 arctan2 hypot copysign fmod remainder addcmul addcdiv clamp clip clamp_min clamp_max logaddexp
    logaddexp2 xlogy heaviside nextafter""".split()
_OPERATORS = """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __pow__ __rpow__
    __mod__ __rmod__ __floordiv__ __rfloordiv__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__""".split()


def _functions(names: list[str]) -> list[Any]:
    found = [getattr(place, name, None) for name in names for place in (torch, torch.Tensor)]
    found += [getattr(torch.Tensor, name + "_", None) for name in names]
    return [function for function in found if function is not None]


@spread(*_functions(_NAMES), *_functions(_OPERATORS))
def elementwise(use: Use, tap: Any) -> Any:
    """Every weight is expanded to the shape of the result."""
    tensors = list(tensors_in((use.args, use.kwargs)))
    writes = use.func.__name__.endswith("_") and not use.func.__name__.endswith("__")
    if (writes and use.tracks(tensors[0])) or any(isinstance(value, int) and not isinstance(value, bool) for value in _axis_arguments(use)):
        return None
    shape = _broadcast_shape(tensors)
    numbers = [tensor for tensor in tensors if tensor.dtype != torch.bool]

    def spread_out(value: Any) -> Any:
        if not use.tracks(value):
            return value
        # A weight without axes does not decide the precision of the result; once expanded it would.
        return tap(value, shape).to(_result_type(numbers)) if value.dim() == 0 and len(shape) else tap(value, shape)

    return use.mapped(spread_out)


def _broadcast_shape(tensors: list[Tensor]) -> torch.Size:
    """torch.broadcast_shapes without its checks (the function itself makes them), which cost more than everything else here."""
    shape = [1] * max(tensor.dim() for tensor in tensors)
    for tensor in tensors:
        for place, size in enumerate(tensor.shape, len(shape) - tensor.dim()):
            if size != 1:
                shape[place] = size
    return torch.Size(shape)


def _result_type(tensors: list[Tensor]) -> torch.dtype:
    if len(tensors) == 2:
        return torch.result_type(*tensors)
    return reduce(torch.promote_types, [tensor.dtype for tensor in tensors if tensor.dim()])


def _axis_arguments(use: Use) -> list[Any]:
    """max(x, 1) reduces along an axis; only max(x, other) is a function of entries."""
    return [*use.args[1:2], use.kwargs.get("dim")] if use.func.__name__ in ("max", "min") else []


_JOINS = "cat concat concatenate stack hstack vstack dstack column_stack".split()
_MOVES = "index_add index_copy index_put scatter scatter_add scatter_reduce index_fill masked_scatter".split()


@spread(*_functions(_JOINS), *_functions(_MOVES))
def moved(use: Use, tap: Any) -> Any:
    """A class token in front of a sequence, entries put to places that the examples choose: each weight is tapped as it stands."""
    if use.func.__name__.endswith("_") and use.tracks(use.args[0]):
        return None
    return use.mapped(lambda value: tap(value) if use.tracks(value) else value)


@spread(torch.Tensor.__setitem__)
def assigned(use: Use, tap: Any) -> Any:
    """x[index] = weight, with x holding examples."""
    target, index, value = use.args
    if use.tracks(target) or not isinstance(value, Tensor) or any(use.tracks(tensor) for tensor in tensors_in(index)):
        return None
    return (target, index, tap(value, target[index].shape)), {}


@spread(torch.Tensor.copy_)
def copied(use: Use, tap: Any) -> Any:
    target, value, *rest = use.args
    return None if use.tracks(target) else ((target, tap(value, target.shape), *rest), dict(use.kwargs))


@rewrite(F.prelu, torch.prelu, torch.Tensor.prelu)
def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """max(0, x) + w·min(0, x), a slope a channel."""
    if weight.numel() > 1 and input.dim() > 1:
        weight = weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


@rewrite(torch.masked_fill, torch.Tensor.masked_fill)
def masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, value, input)


@rewrite(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(tensor.expand(shape) for tensor in tensors)


@rewrite(torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger)
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input.unsqueeze(1) * vec2
