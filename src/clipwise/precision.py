"""What autocast makes of the arguments of a matrix product, before the product is called."""

from __future__ import annotations

import torch
from torch import Tensor

from .marks import CONSTANT, Marks
from .program import dtypes_of_autocast
from .registry import Use

_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)  # float64 is left as it is


def as_autocast_rounds(use: Use, marks: Marks, places: list[int] | None = None) -> Use:
    """The call with its example data in the precision in which autocast will multiply it; the same call where autocast is off.

    The rounding itself is autocast's own, only earlier: autograd and the tape then keep one and the same tensor, in the precision in which
    ordinary training forms the weight's gradient from it. `places`: where the example data is among the arguments, if that is known.
    """
    dtypes = dtypes_of_autocast()
    if not dtypes:
        return use

    def rounded(value: Tensor) -> Tensor:
        if value.dtype not in _ROUNDED:
            return value
        dtype = dtypes.get(value.device.type, value.dtype)
        if dtype == value.dtype:
            return value
        cast = value.to(dtype)
        (marks.mark_constant if marks.kind(value) == CONSTANT else marks.mark_example)(cast)
        return cast

    if places is None or use.kwargs:
        return use.with_others(rounded)
    args = list(use.args)
    for place in places:
        args[place] = rounded(args[place])
    return Use(use.func, tuple(args), use.kwargs, use.tracked)
