"""From clipped sums to what a step releases: (Σ clip(g_i) + N(0, σ²)) / B̄, one draw of noise for every parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as _flatten
from torch._utils import _unflatten_dense_tensors as _unflatten

from .kernels import are_available
from .numerics import accumulation_dtype, number_on
from .randomness import Randomness, Seeded

_MOST_BY_KERNEL = 2**31  # numbers from one seed
_ALIGNED = 16  # bytes that kernels read and write at once
_CHUNK = 2**24  # numbers that are drawn at once: few kernels for many small parameters, little memory for large ones


def noised(
    sums: Sequence[Tensor | None], parameters: Sequence[Tensor], *, deviation: float | Tensor, divisor: float,
    randomness: Randomness, purpose: str, step: int, apart: bool = True, in_place: bool = False,
) -> list[Tensor]:  # fmt: skip
    """For each parameter sum/divisor + (deviation/divisor)·N(0, I), added in float64 and rounded once to the parameter's type.

    A parameter without a sum gets noise alone. No two parameters, steps or purposes share a number. `apart`: each result has a version
    counter of its own. `in_place`: the sums lie in `room_for_sums` and are written over, where they have the parameter's type.
    """
    found: list[Tensor] = list(parameters)
    with torch.no_grad():
        for number, places in enumerate(_chunks(parameters)):
            first = parameters[places[0]]
            sizes = [parameters[place].numel() for place in places]
            mine = [_sum_of(sums[place], parameters[place]) for place in places]
            total = _side_by_side(mine, sum(sizes)) if in_place else _flatten(mine)
            is_ours = in_place or len(mine) > 1  # and no tensor that somebody gave us
            over = total if is_ours and total.dtype == first.dtype else None
            draw = _purpose(purpose, number), step
            if _is_drawn_by_kernel(first, sum(sizes)) and isinstance(randomness, Seeded):
                over = torch.empty_like(total, dtype=first.dtype) if over is None else over
                noisy = _by_kernel(total, deviation / divisor, 1 / divisor, randomness.seed(*draw), over)
            else:
                normals = randomness.gaussians(sum(sizes), *draw, first.device).mul_(deviation / divisor)
                noisy = normals.add_(total, alpha=1 / divisor)
                noisy = noisy.to(first.dtype) if over is None else over.copy_(noisy)
            parts = _unflatten(noisy, [parameters[place] for place in places])
            separate = _apart(parts) if apart and len(parts) > 1 else parts
            for place, gradient in zip(places, separate):
                parameter = parameters[place]
                found[place] = gradient if parameter.is_contiguous() else torch.empty_like(parameter).copy_(gradient)
    return found


def _apart(parts: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """With a version counter each: where the memory of each begins as kernels like it, a tensor of its own there, else a copy."""
    if all(part.data_ptr() % _ALIGNED == 0 for part in parts):
        return [part.data for part in parts]
    return torch._foreach_add(parts, 0.0)


def _sum_of(total: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype)) if total is None else total


def _is_drawn_by_kernel(parameter: Tensor, count: int) -> bool:
    """Whether noise for parameters of this type, so many numbers, is drawn and added by a kernel where they lie."""
    return count < _MOST_BY_KERNEL and are_available(parameter.device, parameter.dtype)


def room_for_sums(parameters: Sequence[Tensor]) -> list[Tensor]:
    """For each parameter zeros in the precision of sums; those that are noised together lie side by side."""
    found: list[Tensor] = list(parameters)
    for places in _chunks(parameters):
        mine = [parameters[place] for place in places]
        stretch = mine[0].new_zeros(sum(parameter.numel() for parameter in mine), dtype=accumulation_dtype(mine[0].dtype))
        for place, room in zip(places, _unflatten(stretch, mine)):
            found[place] = room
    return found


def _side_by_side(sums: Sequence[Tensor], count: int) -> Tensor:
    """The stretch of memory that these make up."""
    filled = [total for total in sums if total.numel()] or sums[:1]
    at = filled[0].data_ptr()
    for total in filled:
        if not total.is_contiguous() or total.data_ptr() != at:
            raise AssertionError("sums that are noised in place lie in room_for_sums")
        at += total.nbytes
    return filled[0].as_strided((count,), (1,))


def _by_kernel(total: Tensor, deviation: float | Tensor, scale: float, seed: int | Tensor, over: Tensor) -> Tensor:
    from .kernels.noise import noised as by_kernel

    def there(number: float | Tensor) -> Tensor:
        """Where the sums lie: what a graph will change lies there already."""
        return number if isinstance(number, Tensor) else number_on(total.device, number)

    seeded = seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=total.device)
    return by_kernel(total, seeded, there(scale), there(deviation), over)


def draws(parameters: Sequence[Tensor], purpose: str) -> list[tuple[str, bool]]:
    """What `noised` draws for, one for each chunk of parameters, and whether a kernel may do it."""
    return [
        (_purpose(purpose, number), _is_drawn_by_kernel(parameters[places[0]], sum(parameters[place].numel() for place in places)))
        for number, places in enumerate(_chunks(parameters))
    ]


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
