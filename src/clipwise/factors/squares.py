"""A squared norm in the making: what was measured where the gradients lie, and how it becomes the squared norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Squares:
    """`combine(*vectors)` is ‖g_i‖² for every example. vectors: (B,) each, in float64.

    Measuring takes large kernels and is done at once; combining takes many small ones, which are free on the host. So the vectors of
    all parameters are copied there together.
    """

    vectors: tuple[Tensor, ...]
    combine: Callable[..., Tensor]

    def now(self) -> Tensor:
        return self.combine(*self.vectors)

    def rounded_up(self, factor: float) -> Squares:
        """For values that are rounded once more before they are added up."""
        return Squares(self.vectors, lambda *vectors: self.combine(*vectors) * factor)

    def with_drift(self, drift: float, mass: Tensor) -> Squares:
        """For sums whose terms may cancel: their error is as large as drift·mass."""
        return Squares((*self.vectors, mass), lambda *vectors: self.combine(*vectors[:-1]) + (drift * vectors[-1]).square())


def together(parts: list[Squares]) -> Squares:
    """Squared norms of disjoint parts add up."""

    def combine(*vectors: Tensor) -> Tensor:
        left = list(vectors)
        first, *rest = (part.combine(*(left.pop(0) for _ in part.vectors)) for part in parts)
        for other in rest:
            first = first + other
        return first

    return Squares(tuple(vector for part in parts for vector in part.vectors), combine)


def known(squares: Tensor) -> Squares:
    """Squared norms that were measured as such."""
    return Squares((squares,), lambda squares: squares)


def squared(norms: Tensor) -> Squares:
    return Squares((norms,), lambda norms: norms.square())
