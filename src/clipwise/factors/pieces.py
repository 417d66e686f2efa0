"""Written-out gradients in several pieces of memory.

On a CPU what is larger than some megabytes comes fresh from the system each time it is asked for, and is filled with zeros page by page: that takes longer
than a product of matrices to write there, and than to read it again. Pieces of a few megabytes are used again, and their norms are taken while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import flat_rows, in_working_precision, to_accumulate, weighted_row_sum
from .dense import Dense
from .squares import Squares, of_rows, one_behind_the_other


class Pieces(Dense):
    """g_1 … of the first piece, then those of the second, and so on. pieces: (b, *shape) each"""

    def __init__(self, pieces: Sequence[Tensor]):
        self._pieces = [to_accumulate(piece) for piece in pieces]
        self.shape = pieces[0].shape[1:]
        self.batch = sum(map(len, pieces))
        self._mass = None

    @property
    def grad(self) -> Tensor:
        """In one piece, (B, *shape)."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]
        return self._pieces[0]

    @property
    def _given(self) -> Tensor:  # type: ignore[override]
        return self.grad

    @property
    def is_whole(self) -> bool:
        return len(self._pieces) == 1

    def squares(self) -> Squares:
        return one_behind_the_other([of_rows(piece) for piece in self._pieces])

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        exact = in_working_precision(weights, self.dtype)
        parts = zip(self._pieces, exact.split([len(piece) for piece in self._pieces]))
        first, *others = (weighted_row_sum(flat_rows(piece), part, clean=clean) for piece, part in parts)
        for other in others:
            first += other
        return first.view(self.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._pieces)
