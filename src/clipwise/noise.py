"""From clipped sums to what a step releases: (Σ clip(g_i) + N(0, σ²)) / B̄, one draw of noise for every parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .randomness import Randomness

_CHUNK = 2**24  # numbers that are drawn at once: few kernels for many small parameters, little memory for large ones


def noised(
    sums: Sequence[Tensor | None], parameters: Sequence[Tensor], *, deviation: float | Tensor, divisor: float,
    randomness: Randomness, purpose: str, step: int,
) -> list[Tensor]:  # fmt: skip
    """For each parameter sum/divisor + (deviation/divisor)·N(0, I), added in float64 and rounded once to the parameter's type.

    A parameter without a sum gets noise alone. No two parameters, steps or purposes share a number.
    """
    found: list[Tensor] = list(parameters)
    with torch.no_grad():
        for number, places in enumerate(_chunks(parameters)):
            device = parameters[places[0]].device
            sizes = [parameters[place].numel() for place in places]
            normals = randomness.gaussians(sum(sizes), _purpose(purpose, number), step, device).mul_(deviation / divisor)
            totals = [sums[place] for place in places]
            flat = [normals.new_zeros(size) if total is None else total.reshape(-1) for size, total in zip(sizes, totals)]
            normals.add_(torch.cat(flat) if len(flat) > 1 else flat[0], alpha=1 / divisor)
            rounded = normals.to(parameters[places[0]].dtype).split(sizes)
            parts = [part.view(parameters[place].shape) for place, part in zip(places, rounded)]
            separate = torch._foreach_add(parts, 0.0) if len(parts) > 1 else parts  # each has a version counter of its own
            for place, gradient in zip(places, separate):
                parameter = parameters[place]
                found[place] = gradient if parameter.is_contiguous() else torch.empty_like(parameter).copy_(gradient)
    return found


def purposes(parameters: Sequence[Tensor], purpose: str) -> list[str]:
    """What the draws of `noised` are for: one for each chunk of parameters."""
    return [_purpose(purpose, number) for number, _ in enumerate(_chunks(parameters))]


def _purpose(purpose: str, number: int) -> str:
    """Of one chunk."""
    return f"{purpose} {number}"


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of parameters of one type on one device, together at most a chunk long, each at least one parameter."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, parameter in enumerate(parameters):
        kinds.setdefault((parameter.device, parameter.dtype), []).append(place)
    for places in kinds.values():
        chunk: list[int] = []
        length = 0
        for place in places:
            if chunk and length + parameters[place].numel() > _CHUNK:
                yield chunk
                chunk, length = [], 0
            chunk.append(place)
            length += parameters[place].numel()
        if chunk:
            yield chunk
