"""What autocast makes of the arguments of a matrix product, before the product is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .marks import CONSTANT, Marks
from .program import AUTOCAST, is_autocast_on
from .registry import Use

_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)  # float64 is left as it is


def as_autocast_rounds(use: Use, marks: Marks) -> Use:
    """The call with its example data in the precision in which autocast will multiply it; the same call where autocast is off.

    The rounding itself is autocast's own, only earlier: autograd and the tape then keep one and the same tensor, in the precision in which
    ordinary training forms the weight's gradient from it.
    """
    return use.with_others(lambda value: _rounded(value, marks)) if is_autocast_on() else use


def rounded_by_autocast(values: tuple[Any, ...], places: list[int], marks: Marks) -> tuple[Any, ...]:
    """The arguments of such a call, where it is known at which of these places the example data is."""
    found = list(values)
    for place in places:
        found[place] = _rounded(values[place], marks)
    return tuple(found)


def _rounded(value: Tensor, marks: Marks) -> Tensor:
    device = "cuda" if value.is_cuda else value.device.type
    if device not in AUTOCAST or value.dtype not in _ROUNDED or not torch.is_autocast_enabled(device):
        return value
    dtype = torch.get_autocast_dtype(device)
    if dtype == value.dtype:
        return value
    cast = value.to(dtype)
    if not cast.requires_grad:  # what carries gradient is taken for example data as it is
        (marks.mark_constant if marks.kind(value) == CONSTANT else marks.mark_example)(cast)
    return cast
