"""A squared norm in the making: what was measured where the gradients lie, and how it becomes the squared norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..tracing import is_tracing


@dataclass(frozen=True)
class Squares:
    """‖g_i‖ = √(factor·value² + mass_factor·mass²) + drift·mass for every example (value itself where it `is_square`). Vectors: (B,), float64.

    Measuring takes large kernels and is done at once. What remains are a few small operations a parameter, which `finish` makes
    for all parameters together, on the host.
    """

    value: Tensor
    factor: float = 1.0
    mass: Tensor | None = None
    mass_factor: float = 0.0
    drift: float = 0.0
    is_square: bool = False

    def now(self) -> Tensor:
        return finish([self])[0]

    @property
    def bare(self) -> Tensor:
        """Squared norms as they were measured, without what is added for rounding."""
        return self.value if self.is_square else self.value.square()

    def in_place(self) -> Tensor:
        """Beside the gradients, by operations that a compiler fuses."""
        total = self.bare * self.factor
        if self.mass is None:
            return total
        return ((total + self.mass.square() * self.mass_factor).sqrt() + self.mass * self.drift).square()

    def rounded_up(self, factor: float) -> Squares:
        """For values that are rounded once more before they are added up."""
        return replace(self, factor=self.factor * factor, mass_factor=self.mass_factor * factor)

    def with_drift(self, drift: float, mass: Tensor) -> Squares:
        """For sums whose terms may cancel: their error is as large as drift·mass, and may point where the gradient does."""
        return replace(self, mass=mass, drift=self.drift + drift)


def known(squares: Tensor) -> Squares:
    """Squared norms that were measured as such."""
    return Squares(squares, is_square=True)


def finish(measured: Sequence[Squares]) -> list[Tensor]:
    """The squared norms of each, where its vectors lie if that is the host, else copied there together; in a graph where they lie."""
    if is_tracing():
        return [squares.in_place() for squares in measured]
    order = sorted(range(len(measured)), key=lambda place: measured[place].mass is None)  # those with a mass first
    ordered = [measured[place] for place in order]
    masses = [squares.mass for squares in ordered if squares.mass is not None]
    vectors = _on_host([*(squares.value for squares in ordered), *masses])
    values = torch.stack(vectors[: len(ordered)])  # (P, B)
    squares = torch.where(_column([float(s.is_square) for s in ordered]) > 0, values, values.square())
    total = squares * _column([s.factor for s in ordered])
    if masses:
        mass, some = torch.stack(vectors[len(ordered) :]), ordered[: len(masses)]
        measured_squares = total[: len(masses)] + mass.square() * _column([s.mass_factor for s in some])
        total[: len(masses)] = (measured_squares.sqrt() + mass * _column([s.drift for s in some])).square()
    found = dict(zip(order, total.unbind(0)))
    return [found[place] for place in range(len(measured))]


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").unsqueeze(1)


def _on_host(vectors: list[Tensor]) -> list[Tensor]:
    """By one copy for each device they lie on."""
    found = list(vectors)
    for device in {vector.device for vector in vectors if vector.device.type != "cpu"}:
        places = [place for place, vector in enumerate(vectors) if vector.device == device]
        for place, row in zip(places, torch.stack([vectors[place] for place in places]).cpu()):
            found[place] = row
    return found
