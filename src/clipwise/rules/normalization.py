"""Normalisation layers: γ's gradient is Σ_t dL/dh ⊙ ĥ, β's is Σ_t dL/dh (paper, Section 5.6 and Algorithm 5).

ĥ = (x − μ)/σ. Where a layer has statistics of its own, torch adds up dL/dh ⊙ x/σ and dL/dh ⊙ μ/σ: inputs far from zero cancel there, and what is rounded
is as large as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import Dense
from ..kernels import are_available
from ..numerics import is_worth_a_kernel, to_accumulate
from ..registry import Call, Factors, Use, own_rule


def _reads_input_for_weight(*names: str) -> Any:
    """The input is needed only where the scale is trained; statistics are needed with it."""

    def reads(use: Use) -> list[Tensor]:
        bound = dict(zip(names, use.bind(*names)))
        needed = [bound.get(name) for name in ("input", "running_mean", "running_var")] if use.tracks(bound["weight"]) else []
        return [tensor for tensor in needed if isinstance(tensor, Tensor)]

    return reads


def _trailing(use: Use, dims: int) -> tuple[int, ...]:
    return tuple(range(dims - len(use.bind("input", "normalized_shape")[1])))


_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")


@own_rule(F.layer_norm, torch.layer_norm, row_axes=_trailing, reads=_reads_input_for_weight(*_LAYER_NORM), known_by=2)
def layer_norm(call: Call) -> Factors:
    """h = γ ⊙ ĥ + β with ĥ normalised over the trailing axes."""
    x, shape, weight, bias, eps = call.bind(*_LAYER_NORM, eps=1e-5)
    grad = call.output_grad  # (R, *, *shape)

    def scales() -> Dense:
        wide, inputs = to_accumulate(grad), to_accumulate(x)
        return Dense.summed(
            wide * F.layer_norm(inputs, shape, eps=eps), weight.shape, parts=lambda: wide.abs() * _parts(inputs, -len(shape), eps)
        )

    def shifts() -> Dense:
        return Dense.summed(to_accumulate(grad), bias.shape)

    both = _by_kernel(grad, x, shape, eps, is_centred=True) if call.tracks(weight) else None
    factors: Factors = {}
    if call.tracks(weight):
        factors[weight] = scales() if both is None else Dense(both[0], mass=lambda: scales().mass())
    if call.tracks(bias):
        factors[bias] = shifts() if both is None else Dense(both[1], mass=lambda: shifts().mass())
    return factors


def _by_kernel(grad: Tensor, x: Tensor, shape: Sequence[int], eps: float, *, is_centred: bool) -> Tensor | None:
    """(2, R, *shape): Σ_t grad ⊙ x̂ and Σ_t grad, where a kernel adds them up sooner than plain operations. grad and x: (R, *, *shape)"""
    width, rows = torch.Size(shape).numel(), grad.shape[0]
    if grad.numel() <= rows * width or not is_worth_a_kernel(grad) or not are_available(x.device, x.dtype):
        return None
    from ..kernels.normalization import WIDEST, normalized_sums

    if width > WIDEST:
        return None
    return normalized_sums(grad.reshape(rows, -1, width), x.reshape(rows, -1, width), eps, is_centred).view(2, rows, *shape)


_RMS_NORM = ("input", "normalized_shape", "weight", "eps")


@own_rule(F.rms_norm, torch.rms_norm, row_axes=_trailing, reads=_reads_input_for_weight(*_RMS_NORM), known_by=2)
def rms_norm(call: Call) -> Factors:
    """h = γ ⊙ x / rms(x). Without an eps torch takes the machine epsilon of the input, so the input keeps its precision."""
    x, shape, weight, eps = call.bind(*_RMS_NORM)

    def scales() -> Dense:
        normalized = to_accumulate(F.rms_norm(x, shape)) if eps is None else F.rms_norm(to_accumulate(x), shape, eps=eps)
        return Dense.summed(to_accumulate(call.output_grad) * normalized, weight.shape)

    both = None if eps is None else _by_kernel(call.output_grad, x, shape, eps, is_centred=False)
    return {weight: scales() if both is None else Dense(both[0], mass=lambda: scales().mass())}


def _parts(x: Tensor, first: int, eps: float) -> Tensor:
    """|x|/σ + |μ|/σ, of statistics over the axes from the `first` on."""
    flat = x.flatten(first)
    variance, mean = torch.var_mean(flat, -1, correction=0, keepdim=True)
    return ((flat.abs() + mean.abs()) * (variance + eps).rsqrt()).view(x.shape)


def _channels(call: Call, normalized: Tensor | None, weight: Any, bias: Any, parts: Callable[[], Tensor] | None = None) -> Factors:
    """One scale and shift a channel, channels on axis 1."""
    grad = to_accumulate(call.output_grad)  # (R, C, *)

    def by_place(terms: Tensor) -> Tensor:
        return terms.unsqueeze(-1).flatten(2).mT  # (R, T, C)

    factors: Factors = {}
    if normalized is not None:
        larger = None if parts is None else lambda: by_place(grad.abs() * parts())
        factors[weight] = Dense.summed(by_place(grad * normalized), weight.shape, parts=larger)
    if call.tracks(bias):
        factors[bias] = Dense.summed(by_place(grad), bias.shape)
    return factors


_GROUP_NORM = ("input", "num_groups", "weight", "bias", "eps")


@own_rule(F.group_norm, torch.group_norm, row_axes=lambda use, dims: (0,), reads=_reads_input_for_weight(*_GROUP_NORM), known_by=2)
def group_norm(call: Call) -> Factors:
    x, groups, weight, bias, eps = call.bind(*_GROUP_NORM, eps=1e-5)
    normalized = F.group_norm(to_accumulate(x), groups, eps=eps) if call.tracks(weight) else None
    return _channels(call, normalized, weight, bias, lambda: _parts_of_groups(to_accumulate(x), groups, eps))


def _parts_of_groups(x: Tensor, groups: int, eps: float) -> Tensor:
    return _parts(x.unflatten(1, (groups, -1)), 2, eps).view(x.shape)


_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")


@own_rule(F.instance_norm, row_axes=lambda use, dims: (0,), reads=_reads_input_for_weight(*_INSTANCE_NORM), known_by=3)
def instance_norm(call: Call) -> Factors:
    """Each image by its own statistics, or by the running ones in evaluation mode."""
    x, mean, variance, weight, bias, own_statistics, _, eps = call.bind(*_INSTANCE_NORM, use_input_stats=True, eps=1e-5)
    if not call.tracks(weight):
        return _channels(call, None, weight, bias)
    x = to_accumulate(x)
    if own_statistics:
        return _channels(call, F.instance_norm(x, eps=eps), weight, bias, lambda: _parts_of_groups(x, x.shape[1], eps))
    return _channels(call, _by_statistics(x, mean, variance, eps), weight, bias)


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@own_rule(F.batch_norm, row_axes=lambda use, dims: (0,), reads=_reads_input_for_weight(*_BATCH_NORM), known_by=3)
def batch_norm(call: Call) -> Factors:
    """The paper's frozen BatchNorm: running statistics, in evaluation mode; training mode was refused at the call (guards.py)."""
    x, mean, variance, weight, bias, _, _, eps = call.bind(*_BATCH_NORM, eps=1e-5)
    normalized = _by_statistics(to_accumulate(x), mean, variance, eps) if call.tracks(weight) else None
    return _channels(call, normalized, weight, bias)


def _by_statistics(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """(x − mean) / √(variance + eps), a statistic a channel. x: (R, C, *)"""
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean, variance = mean.to(x.dtype).view(shape), variance.to(x.dtype).view(shape)
    return (x - mean) * (variance + eps).rsqrt()
