"""When two runs agree: as far as rounding goes, and no further than the inputs determine the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .numerics import accumulation_dtype, flat_rows

# Relative differences that rounding may cause: with the same shapes, and with others.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
TOLERANCE_ON_GPU = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # atomic sums
WITH_OTHER_SHAPES = 0.2
BLURRED_RUNS = 2
BLUR = 64.0  # one random rounding of the inputs stands for the many that a long sum makes on its way
_NUMBERS_AT_ONCE = 2**22  # outputs may be large: they are compared in pieces


def allowed(tensor: Tensor) -> float:
    """The relative difference that the order of sums may cause where shapes are the same."""
    return (TOLERANCE_ON_GPU if tensor.is_cuda else TOLERANCE)[tensor.dtype]


def close(a: Tensor, b: Tensor, tolerance: float, noise: Tensor | float = 0.0) -> bool:
    """Whether two tensors agree, relative to the largest entry, and up to the noise of each row. What is not finite says nothing.

    a, b: (R, ...), noise: (R,)
    """
    sizes, errors = [], []
    for x, y in _pieces(a, b):
        error, size = (x - y).abs_(), x.abs()
        silent = ~(error.isfinite() & size.isfinite())
        sizes.append(size.masked_fill_(silent, 0).amax())
        errors.append(error.masked_fill_(silent, 0).amax(1))
    if not errors:
        return True
    permitted = tolerance * torch.stack(sizes).amax().double() + BLUR * torch.as_tensor(noise, device=a.device).double()
    return not bool((torch.cat(errors).double() > permitted).any())


def blur(rows: Tensor, runs: Sequence[Tensor]) -> Tensor | float:
    """(R,): how far each row moves when the inputs move by a rounding. Terms that cancel make that much of a little."""
    moved = [torch.cat([(x - y).abs_().nan_to_num_(0, 0, 0).amax(1) for x, y in _pieces(rows, run)]) for run in runs if rows.numel()]
    return torch.stack(moved).amax(0) if moved else 0.0


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of both at a time, in the precision of sums: (r, m)."""
    if a.numel():
        step = max(1, _NUMBERS_AT_ONCE * len(a) // a.numel())
        wide = accumulation_dtype(a.dtype)
        for x, y in zip(a.detach().split(step), b.detach().split(step)):
            yield flat_rows(x.to(wide)), flat_rows(y.to(wide))
