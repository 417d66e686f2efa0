"""Weights that meet the examples entry by entry: scales, shifts, class tokens, learned queries, temperatures.

The weight is expanded to the shape at which it meets the examples and tapped there, on its own side. Autograd then gives
the gradient of every expanded entry, whatever the function (mul, where, lerp …), and the gradient of an example is the sum
over the entries that belong to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UncoveredUse
from ..factors import Dense, Diagonal, Factor
from ..layout import from_rows
from ..numerics import accumulation_dtype, squared_norms, to_accumulate
from ..registry import Call, Factors, Rule, all_but_last


def _spread_factors(call: Call) -> Factors:
    (weight,) = call.tracked
    return {weight: spread_factor(call.output_grad, call.axes, call.output_shape, weight.shape)}


def spread_factor(grad: Tensor, axes: tuple[int, ...], expanded: torch.Size, shape: torch.Size) -> Factor:
    """The factor of a weight of shape `shape`, from the gradient of its expansion to `expanded`. grad: (R, rest), rows along `axes`."""
    dims = len(expanded)
    aligned = (1,) * (dims - len(shape)) + tuple(shape)
    rest = [axis for axis in range(dims) if axis not in axes]
    own_rows = [aligned[axis] != 1 for axis in axes]
    if not any(own_rows):
        repeated = [1 + place for place, axis in enumerate(rest) if aligned[axis] == 1 and expanded[axis] != 1]
        rows = grad.shape[0]
        if not repeated:
            return Dense(grad.reshape(rows, *shape))
        summed = grad.sum(repeated, dtype=accumulation_dtype(grad.dtype)).reshape(rows, *shape)
        return Dense(summed, mass=lambda: squared_norms(to_accumulate(grad).abs().sum(repeated).reshape(rows, -1)).sqrt())
    if not all(own_rows):
        raise UncoveredUse(
            f"a weight of shape {tuple(shape)} meets examples laid out along axes {axes} of {tuple(expanded)}, of which it has only some.",
            "Expand the weight to all of these axes, or flatten them into one batch axis.",
        )
    whole = from_rows(to_accumulate(grad).unsqueeze(0), axes, expanded)[0]
    repeated = [axis for axis in range(dims) if aligned[axis] == 1 and expanded[axis] != 1]
    if repeated:
        whole = whole.sum(repeated, keepdim=True)
    return Diagonal(whole.reshape(shape), tuple(axis - (dims - len(shape)) for axis in axes))


spread_rule = Rule(_spread_factors, row_axes=all_but_last(0), trusted=True)
