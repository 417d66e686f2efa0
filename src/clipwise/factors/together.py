"""Norms of many small matrices at once: a network of small layers spends its time on starting kernels, not on arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..numerics import flat_rows

_WORTH_COPYING = {"cuda": 2**22, "cpu": 2**16}  # numbers that are put side by side sooner than measured one after the other


def row_squares_together(matrices: Sequence[Tensor]) -> Tensor | None:
    """‖row‖² for every row of every matrix, in float64; None where they do not fit together. matrices: K of (B, ...) → (B, K)

    They are put side by side, squared, and added up by one product with a matrix of zeros and ones. A row that is not finite
    makes all its norms NaN: that example contributes nothing whichever of its gradients it was.
    """
    first = matrices[0]
    same = all(matrix.dtype == first.dtype and matrix.device == first.device for matrix in matrices)
    numbers = sum(matrix.numel() for matrix in matrices)
    added_up = numbers // max(len(first), 1) * len(matrices)  # what the matrix of zeros and ones holds
    if not same or max(numbers, added_up) > _WORTH_COPYING.get(first.device.type, 0):
        return None
    distinct: dict[tuple[int, torch.Size], int] = {}
    flat: list[Tensor] = []
    places = []
    for matrix in matrices:
        rows = flat_rows(matrix)
        place = distinct.setdefault((rows.data_ptr(), rows.shape) if rows.is_contiguous() else (id(matrix), rows.shape), len(flat))
        if place == len(flat):
            flat.append(rows)
        places.append(place)
    squares = torch.cat(flat, 1).double().square_()
    return squares @ _indicator(tuple(rows.shape[1] for rows in flat), tuple(places), first.device)


@lru_cache(maxsize=64)
def _indicator(lengths: tuple[int, ...], places: tuple[int, ...], device: torch.device) -> Tensor:
    """(Σ lengths, K): column k is one on the stretch places[k]."""
    stretches = torch.block_diag(*(torch.ones(length, 1, dtype=torch.float64, device="cpu") for length in lengths))
    return stretches[:, list(places)].to(device)


def products_of_columns(columns: Tensor, factors: Sequence[float]) -> Sequence[Tensor]:
    """For each factor, factor times its column; the columns beyond those multiply the first ones. columns: (B, K) → (B,) each. In place."""
    count = len(factors)
    found = columns[:, :count]
    if columns.shape[1] > count:
        found[:, : columns.shape[1] - count].mul_(columns[:, count:])
    return found.mul_(_row(tuple(factors))).unbind(1)


@lru_cache(maxsize=64)
def _row(factors: tuple[float, ...]) -> Tensor:
    return torch.tensor(factors, dtype=torch.float64, device="cpu")
