"""Norms of many small matrices at once: a network of small layers spends its time on starting kernels, not on arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..numerics import flat_rows, squared_norms, to_accumulate, weighted_row_sum

_WORTH_ADDING = {"cuda": 2**22, "cpu": 2**16}  # numbers that are put side by side and added up by one product …
_WORTH_STACKING = {"cuda": 2**26, "cpu": 2**16}  # … or on top of each other where they have one length
_WORTH_COPYING = {"cuda": 2**18, "cpu": 2**10}  # numbers of a single matrix that is copied to be beside others


class Together:
    """Squared norms in the making."""

    def __init__(self, rows: Tensor, places: Sequence[int]):
        self._rows = rows  # (K', B), where the matrices lie
        self._places = tuple(places)  # of each matrix in it

    def on_host(self) -> Tensor:
        """(B, K), in float64"""
        return self._rows.cpu().index_select(0, _index(self._places)).t()


def row_squares_together(matrices: Sequence[Tensor]) -> Together | None:
    """‖row‖² for every row of every matrix, in float64; None where they do not fit together. matrices: K of (B, ...)

    Few numbers are put side by side, squared, and added up by one product with a matrix of zeros and ones; there a row that is not finite
    makes all its norms NaN (that example contributes nothing whichever of its gradients it was). Many are stacked, those of a length.
    """
    matrices = [to_accumulate(matrix) for matrix in matrices]
    first = matrices[0]
    same = all(matrix.dtype == first.dtype and matrix.device == first.device for matrix in matrices)
    numbers = sum(matrix.numel() for matrix in matrices)
    if not same or numbers > _WORTH_STACKING.get(first.device.type, 0):
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
    added_up = numbers // max(len(first), 1) * len(flat)  # what the matrix of zeros and ones holds
    if max(numbers, added_up) <= _WORTH_ADDING.get(first.device.type, 0):
        squares = torch.cat(flat, 1).double().square_()
        return Together(_indicator(tuple(rows.shape[1] for rows in flat), first.device) @ squares.t(), places)
    return _stacked(flat, places)


def row_squares_of_each(matrices: Sequence[Tensor]) -> list[Tensor]:
    """‖row‖² for every row of every matrix, in float64, where they lie; small ones of one shape stacked. matrices: (B, ...) each → (B,) each"""
    flat = [flat_rows(to_accumulate(matrix)) for matrix in matrices]
    alike: dict[tuple[torch.Size, torch.dtype, bool], list[int]] = {}
    for place, rows in enumerate(flat):
        is_small = rows.numel() <= _WORTH_COPYING.get(rows.device.type, 0)
        alike.setdefault((rows.shape, rows.dtype, is_small), []).append(place)
    found: dict[int, Tensor] = {}
    for (_, _, is_small), places in alike.items():
        if is_small and len(places) > 1:
            found |= zip(places, _squares_of_stack([flat[place] for place in places]).unbind(0))
        else:
            found |= {place: squared_norms(flat[place]) for place in places}
    return [found[place] for place in range(len(flat))]


def products(squares: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    """For each factor, factor times its vector; the vectors beyond those multiply the first ones."""
    count = len(factors)
    found = [one if factor == 1.0 else one * factor for one, factor in zip(squares, factors)]
    return [one * other for one, other in zip(found, squares[count:])] + found[len(squares) - count :]


def _squares_of_stack(alike: Sequence[Tensor]) -> Tensor:
    """(K, B), of K matrices (B, n)"""
    return squared_norms(torch.stack(list(alike)).flatten(0, 1)).view(len(alike), -1)


def _stacked(flat: Sequence[Tensor], places: Sequence[int]) -> Together:
    """Matrices of one length on top of each other."""
    by_length: dict[int, list[int]] = {}
    for place, rows in enumerate(flat):
        by_length.setdefault(rows.shape[1], []).append(place)
    squares = [_squares_of_stack([flat[place] for place in group]) for group in by_length.values()]
    order = {place: position for position, place in enumerate(place for group in by_length.values() for place in group)}
    return Together(torch.cat(squares), [order[place] for place in places])


def weighted_sums_together(matrices: Sequence[Tensor], weights: Tensor, *, clean: bool) -> list[Tensor]:
    """Σ_i weights[i]·row_i of each; small ones side by side. matrices: (B, n) each, weights: (B,), all of one type → (n,) each"""
    worth = _WORTH_COPYING.get(weights.device.type, 0)
    few = [place for place, matrix in enumerate(matrices) if matrix.numel() <= worth]
    found: dict[int, Tensor] = {}
    if len(few) > 1:
        side_by_side = torch.cat([matrices[place] for place in few], 1)
        lengths = [matrices[place].shape[1] for place in few]
        found = dict(zip(few, weighted_row_sum(side_by_side, weights, clean=clean).split(lengths)))
    return [found[place] if place in found else weighted_row_sum(matrix, weights, clean=clean) for place, matrix in enumerate(matrices)]


@lru_cache(maxsize=64)
def _indicator(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(K, Σ lengths): row k is one on the k-th stretch."""
    return torch.block_diag(*(torch.ones(1, length, dtype=torch.float64, device="cpu") for length in lengths)).to(device)


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


@lru_cache(maxsize=64)
def _index(places: tuple[int, ...]) -> Tensor:
    return torch.tensor(places, device="cpu")
