"""Whether a graph and the eager step found the same clipped sums, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..numerics import rounds_to_tf32, unit_roundoff

# Relative to the most that the examples could add up to. Two orders of the same sums differ by far less; what the test is for, a
# number baked into the graph that has changed since, moves a gradient by per cents. In bf16 only coarse differences can be told.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}

_REPEATED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # the same kernels on the same numbers
_PART = 2**22  # numbers that are compared at once


def agree(pairs: Sequence[tuple[Tensor, Tensor]], precision: torch.dtype, most: float) -> bool:
    """‖Σ differences‖ ≤ tolerance·‖sums‖, or a thousandth of that of `most`, the number of examples times the bound."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5
    size = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
    return difference <= _TOLERANCE[precision] * max(size, 1e-3 * most)


def agree_each(pairs: Sequence[tuple[Tensor, Tensor]], precision: torch.dtype) -> bool:
    """‖difference‖ ≤ tolerance·‖sum‖ for each of them, or a hundredth of that of what they have on average."""
    sizes = [float(b.double().norm()) for _, b in pairs]
    average = (sum(size**2 for size in sizes) / max(len(sizes), 1)) ** 0.5
    return all(
        float((a.double() - b.double()).norm()) <= _TOLERANCE[precision] * max(size, 1e-2 * average) for (a, b), size in zip(pairs, sizes)
    )


def repeats(found: Tensor, expected: Tensor, precision: torch.dtype) -> bool:
    """Whether both are the same up to the order of sums, number by number; what is not finite is so in both.

    Squares of norms, of which each may matter, must agree for themselves; entries of sums may cancel.
    """
    if found.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(found, expected)
    tolerance, parts = _REPEATED[precision], list(zip(found.flatten().split(_PART), expected.flatten().split(_PART)))
    each_matters = len(parts) == 1 and bool((expected >= 0).all())
    mean_square = sum(float(b.double().nan_to_num(0, 0, 0).square().sum()) for _, b in parts) / max(expected.numel(), 1)
    slack = 0.0 if each_matters else tolerance * mean_square**0.5
    return all(bool(torch.isclose(a.double(), b.double(), rtol=tolerance, atol=slack, equal_nan=True).all()) for a, b in parts)


def norms_agree(found: Tensor, expected: Tensor, precision: torch.dtype) -> bool:
    """Squared norms, in which each way allows for its own rounding: twice the tolerance, and twice more in squares."""
    negligible = 1e-12 * float(expected.amax()) if expected.numel() else 0.0
    return bool(torch.isclose(found.cpu(), expected.cpu(), rtol=4 * _TOLERANCE[precision], atol=negligible).all())


def coarsest(graph: GraphModule, device: torch.device) -> torch.dtype:
    """The coarsest precision in which a graph computes. TF32 has the digits of float16."""
    found = {torch.float64}
    by_cudnn = any("convolution" in str(node.target) or "cudnn" in str(node.target) for node in graph.graph.nodes)
    if device.type == "cuda" and rounds_to_tf32(by_cudnn=by_cudnn):
        found.add(torch.float16)
    for node in graph.graph.nodes:
        value = node.meta.get("val", node.meta.get("tensor_meta"))
        dtype = getattr(value, "dtype", None)
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            found.add(dtype)
    return max(found, key=unit_roundoff)
