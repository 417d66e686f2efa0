"""A clipping bound that follows a quantile of the norms, privately (Andrew et al. 2021; Thakkar et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .clipping import Clipping, Flat, Group, check_positive
from .errors import BadClipping

_SHARE = 0.01  # of the budget 1/z² that the count takes, where its noise is not given


@dataclass(frozen=True)
class Adaptive(Clipping):
    initial: float
    quantile: float
    learning_rate: float
    count_noise: float | None

    def __post_init__(self) -> None:
        check_positive(self.initial)
        check_positive(self.learning_rate, "the learning rate of the bound")
        if self.count_noise is not None:
            check_positive(self.count_noise, "the noise of the count")
        if not 0 < check_positive(self.quantile, "the quantile") < 1:
            raise BadClipping(f"the quantile must lie between 0 and 1, got {self.quantile!r}.", "0.5 follows the median.")

    @property
    def sensitivity(self) -> float:
        return self.initial

    def groups(self, names: Sequence[str]) -> list[Group]:
        return [Group(tuple(names), self.initial)]

    def at(self, bound: float) -> Clipping:
        """The clipping of a step at which the bound has moved to here."""
        return Flat(bound)

    def noise_of_count(self, noise_multiplier: float) -> float:
        """σ_b, in examples."""
        return noise_multiplier / (2 * math.sqrt(_SHARE)) if self.count_noise is None else self.count_noise

    def noise_of_sums(self, noise_multiplier: float) -> float:
        """z_Δ = (z⁻² − (2σ_b)⁻²)^(−½): gradients and the centred count, which one example moves by ½, together cost what z alone does."""
        left = noise_multiplier**-2 - (2 * self.noise_of_count(noise_multiplier)) ** -2
        if left <= 0:
            raise BadClipping(
                f"a count with noise {self.count_noise:g} alone costs more than the noise multiplier {noise_multiplier:g} allows.",
                f"Raise count_noise above {noise_multiplier / 2:g}, or leave it out.",
            )
        return left**-0.5

    def moved(self, bound: float, share_below: float) -> float:
        """C·exp(−η(b̃ − γ)), where b̃ is the noised share of examples whose norm is at most C."""
        return bound * math.exp(-self.learning_rate * (share_below - self.quantile))


def adaptive(initial: float = 1.0, *, quantile: float = 0.5, learning_rate: float = 0.2, count_noise: float | None = None) -> Clipping:
    """The whole gradient is scaled down to a bound that follows the `quantile` of the norms, learnt from a private count.

    Each step releases, besides the gradients, how many examples lay below the bound, with Gaussian noise of `count_noise`
    examples (by default so much that it takes a hundredth of the budget). The plan's noise multiplier covers both.
    Outside PrivateTraining it clips at `initial`.
    """
    return Adaptive(initial, quantile, learning_rate, count_noise)
