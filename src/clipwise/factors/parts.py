"""A tensor of which disjoint parts are used, each with factors of its own; and which sum a list of factors makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..planner import MemoryBudget
from .base import Factor
from .dense import Dense
from .placed import Placed, Region, are_disjoint
from .squares import Squares, finish
from .sums import FactorSum


class PartSum:
    """The same for a tensor of which disjoint parts are used: squared norms of the parts add up."""

    def __init__(self, parts: Sequence[Placed]):
        by_region: dict[Region, list[Factor]] = {}
        for part in parts:
            by_region.setdefault(part.region, []).append(part.inner)
        self._whole = parts[0].whole
        self.parts = {region: FactorSum(inners) for region, inners in by_region.items()}
        self.batch = parts[0].batch
        self.shape = parts[0].shape

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        sums = {region: part.weighted_sum(weights, clean=clean) for region, part in self.parts.items()}
        some = next(iter(sums.values()))
        out = torch.zeros(self._whole.extent, dtype=some.dtype, device=some.device)
        for region, part in sums.items():
            out.as_strided(region.shape, region.stride, region.offset).copy_(part)
        return out.as_strided(self._whole.shape, self._whole.stride)

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        placed = [Placed(Dense(part.dense(start, stop)), region, self._whole) for region, part in self.parts.items()]
        return torch.stack([part.dense() for part in placed]).sum(0)

    def mass(self) -> Tensor:
        return torch.stack([part.mass() for part in self.parts.values()]).square().sum(0).sqrt()

    def squared_norms(self, budget: MemoryBudget) -> Tensor:
        return torch.stack(finish(self.measures(budget))).sum(0)

    def measures(self, budget: MemoryBudget, *, second_pass: torch.dtype | None = None) -> list[Squares]:
        return [part.measure(budget, second_pass=second_pass) for part in self.parts.values()]

    @property
    def way(self) -> str:
        return ", ".join(dict.fromkeys(part.way for part in self.parts.values()))

    @property
    def seconds(self) -> float | None:
        found = [part.seconds for part in self.parts.values() if part.seconds is not None]
        return sum(found) if found else None

    @property
    def kept_bytes(self) -> int:
        return sum(part.kept_bytes for part in self.parts.values())

    @property
    def summary(self) -> str:
        return f"{len(self.parts)} parts of " + next(iter(self.parts.values())).summary

    def forget_terms(self) -> None:
        for part in self.parts.values():
            part.forget_terms()

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parts.values())).dtype


def sum_of(factors: Sequence[Factor]) -> FactorSum | PartSum:
    """All factors of one tensor as one."""
    if len(factors) == 1 and not isinstance(factors[0], Placed):
        return FactorSum(factors)
    parts = [factor for factor in factors if isinstance(factor, Placed)]
    if len(parts) == len(factors) and are_disjoint(frozenset(part.region for part in parts), parts[0].whole):
        return PartSum(parts)
    return FactorSum(factors)
