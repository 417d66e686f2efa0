"""Convolutions in one to three dimensions, transposed or not (paper, Section 5.2 and Appendix: 3D)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import Convolution, Dense, Geometry
from ..registry import Call, Factors, Use, own_rule


def _each_axis(value: Any, dimensions: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dimensions
    values = tuple(value)
    return values * dimensions if len(values) == 1 else values


def _row_axes(use: Use, dims: int) -> tuple[int, ...]:
    """The first axis, or none for a single image without a batch axis."""
    weight = use.bind("input", "weight")[1]
    return (0,) if dims == weight.dim() else ()


def _reads(use: Use) -> list[Tensor]:
    x, weight = use.bind("input", "weight")
    return [x] if use.tracks(weight) else []


@own_rule(F.conv1d, F.conv2d, F.conv3d, row_axes=_row_axes, reads=_reads, is_product=True)
def convolution(call: Call) -> Factors:
    """The kernel's gradient is Σ over windows of (output gradient at the window) ⊗ (window), the bias's Σ over places."""
    x, weight, bias, stride, padding, dilation, groups = call.bind(
        "input", "weight", "bias", "stride", "padding", "dilation", "groups", stride=1, padding=0, dilation=1, groups=1
    )
    factors = _bias_factor(call, bias)
    if call.tracks(weight):
        n = weight.dim() - 2
        dilation = _each_axis(dilation, n)
        if padding == "same":
            x, padding = _padded_to_same(x, weight.shape[2:], dilation)
        padding = _each_axis(0 if padding == "valid" else padding, n)
        geometry = Geometry(_each_axis(stride, n), padding, dilation, groups)
        factors[weight] = Convolution.of_rows(call.output_grad, x, weight.shape, geometry)
    return factors


@own_rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, row_axes=_row_axes, reads=_reads, is_product=True)
def transposed_convolution(call: Call) -> Factors:
    """The same with the roles of input and output exchanged."""
    x, weight, bias, stride, padding, output_padding, groups, dilation = call.bind(
        "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
        stride=1, padding=0, output_padding=0, groups=1, dilation=1,
    )  # fmt: skip
    factors = _bias_factor(call, bias)
    if call.tracks(weight):
        n = weight.dim() - 2
        stride, padding, dilation, output_padding = (_each_axis(value, n) for value in (stride, padding, dilation, output_padding))
        geometry = Geometry(stride, padding, dilation, groups, transposed=True, output_padding=output_padding)
        factors[weight] = Convolution.of_rows(call.output_grad, x, weight.shape, geometry)
    return factors


def _bias_factor(call: Call, bias: Any) -> Factors:
    if not call.tracks(bias):
        return {}
    return {bias: Dense.summed(call.output_grad.flatten(2).mT, bias.shape)}


def _padded_to_same(x: Tensor, kernel: torch.Size, dilation: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """padding="same" as torch does it: an odd zero goes to the end of the axis."""
    totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
    odd = [total % 2 for total in totals]
    if any(odd):
        x = F.pad(x, [amount for end in reversed(odd) for amount in (0, end)])
    return x, tuple(total // 2 for total in totals)
