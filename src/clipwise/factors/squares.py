"""A squared norm in the making: what was measured where the gradients lie, and how it becomes the squared norm."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..declared import constant
from ..numerics import measure_rows
from ..tracing import is_tracing, made_once_for_graphs_too


@dataclass(frozen=True)
class Squares:
    """‖g_i‖ = √(factor·value² + mass_factor·mass²) + drift·mass for every example (value itself where it `is_square`). Vectors: (B,), float64.

    Measuring takes large kernels and is done at once. What remains are a few small operations a parameter, which `finish` makes
    for all parameters together.
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

    @property
    def form(self) -> Hashable:
        """What the formula consists of, whatever its numbers."""
        return self.factor == 1.0, self.mass is None, self.mass_factor == 0.0, self.drift == 0.0, self.is_square

    def rounded_up(self, factor: float) -> Squares:
        """For values that are rounded once more before they are added up."""
        return replace(self, factor=self.factor * factor, mass_factor=self.mass_factor * factor)

    def with_drift(self, drift: float, mass: Tensor) -> Squares:
        """For sums whose terms may cancel: their error is as large as drift·mass, and may point where the gradient does."""
        return replace(self, mass=mass, drift=self.drift + drift)


def known(squares: Tensor) -> Squares:
    """Squared norms that were measured as such."""
    return Squares(squares, is_square=True)


def of_rows(rows: Tensor) -> Squares:
    """The norms of gradients that are written out. rows: (B, ...)"""
    found, is_square = measure_rows(rows)
    return Squares(found, is_square=is_square)


def one_behind_the_other(chunks: Sequence[Squares]) -> Squares:
    """Of all examples, from those of a few each."""
    return chunks[0] if len(chunks) == 1 else known(torch.cat([chunk.bare for chunk in chunks]))


def finish(measured: Sequence[Squares]) -> list[Tensor]:
    """The squared norms of each, on the host (in a graph where its vectors lie): those that are made in one way are made together."""
    vectors = [squares.value for squares in measured] + [squares.mass for squares in measured if squares.mass is not None]
    if not is_tracing():
        vectors = _on_host(vectors)
    masses = iter(vectors[len(measured) :])
    mass_of = {place: next(masses) for place, squares in enumerate(measured) if squares.mass is not None}
    alike: dict[Hashable, list[int]] = {}
    for place, one in enumerate(measured):
        alike.setdefault((one.form, vectors[place].device), []).append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        mass = _stacked([mass_of[place] for place in places]) if places[0] in mass_of else None
        value = _stacked([vectors[place] for place in places])
        found |= zip(places, _finished([measured[place] for place in places], value, mass).unbind(0))
    return [found[place] for place in range(len(measured))]


def _finished(alike: Sequence[Squares], value: Tensor, mass: Tensor | None) -> Tensor:
    """(K, B), of K that have one form; value and mass: theirs, (K, B)"""
    one, device = alike[0], value.device
    total = replace(one, value=value).bare
    if one.factor != 1.0:
        total = total * _numbers(tuple([each.factor for each in alike]), device)
    if mass is None:
        return total
    if one.mass_factor:
        total = total + mass.square() * _numbers(tuple([each.mass_factor for each in alike]), device)
    return (total.sqrt() + mass * _numbers(tuple([each.drift for each in alike]), device)).square() if one.drift else total


def _numbers(numbers: tuple[float, ...], device: torch.device) -> float | Tensor:
    """One for each row: the number itself, where all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else _column(numbers, device)


@made_once_for_graphs_too
def _column(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """(K, 1)"""
    return constant(torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1))


def _stacked(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)) if len(vectors) > 1 else vectors[0].unsqueeze(0)


def _on_host(vectors: list[Tensor]) -> list[Tensor]:
    """By one copy for each device they lie on."""
    found = list(vectors)
    for device in {vector.device for vector in vectors if vector.device.type != "cpu"}:
        places = [place for place, vector in enumerate(vectors) if vector.device == device]
        for place, row in zip(places, torch.stack([vectors[place] for place in places]).cpu()):
            found[place] = row
    return found
