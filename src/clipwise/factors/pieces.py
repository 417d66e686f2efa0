"""Written-out gradients in several pieces of memory.

On a CPU what is larger than some megabytes comes fresh from the system each time it is asked for, and is filled with zeros page by page: that takes longer
than a product of matrices to write there, and than to read it again. Pieces of a few megabytes are used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..numerics import in_working_precision
from .dense import Dense
from .squares import Squares, one_behind_the_other


class Pieces(Dense):
    """g_1 … of the first piece, then those of the second, and so on: (b, *shape) each."""

    def __init__(self, pieces: Sequence[Dense]):
        self._pieces = list(pieces)
        self.shape = pieces[0].shape
        self.batch = sum(piece.batch for piece in pieces)
        self._mass = None

    @property
    def grad(self) -> Tensor:
        """In one piece, (B, *shape)."""
        if not self.is_whole:
            self._pieces = [Dense(torch.cat(self.tensors))]
        return self._pieces[0].grad

    @property
    def _given(self) -> Tensor:  # type: ignore[override]
        return self.grad

    @property
    def is_whole(self) -> bool:
        return len(self._pieces) == 1

    def squares(self) -> Squares:
        return one_behind_the_other([piece.squares() for piece in self._pieces])

    def part(self, start: int, stop: int) -> Tensor:
        parts = [piece.part(max(start - first, 0), max(stop - first, 0)) for first, piece in self._places()]
        first, *others = [part for part in parts if len(part)] or parts[:1]
        return torch.cat([first, *others]) if others else first

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        exact = in_working_precision(weights, self.dtype)
        total, *others = (piece.weighted_sum(exact[first : first + piece.batch], clean=clean) for first, piece in self._places())
        for other in others:
            total += other
        return total

    def mass(self) -> Tensor:
        return torch.cat([piece.mass() for piece in self._pieces])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([piece.grad for piece in self._pieces])

    def _places(self) -> Iterator[tuple[int, Dense]]:
        """(number of its first example, piece)"""
        first = 0
        for piece in self._pieces:
            yield first, piece
            first += piece.batch
